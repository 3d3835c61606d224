"""Size against quality: `--quant auto` at several sizes beside the uniform methods, on one text.

    python benchmarks/frontier_text.py docs.txt
    python benchmarks/frontier.py MODEL --text docs.txt --work FOLDER --sizes 80MB,92MB --quant gptq4 \
        --without q4_1 --out build/frontier

Every engine is compiled for this machine into FOLDER unless it is there already. Then all engines run with their own
kernels on windows of 512 tokens, beside MODEL in float32: perplexity, its rise, and the mean KL divergence per token.
`auto` measures a model once for all sizes; it never chooses the formats of --without.
Writes OUT.json and OUT.md, and OUT.svg if matplotlib is installed. Rows of an earlier OUT.json stay. --stated adds the
figures of other engines from the issue that asked for this (same model, 80 KB of other English documentation).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import exp
from pathlib import Path
from typing import Any

import icc
import torch
from icc.compiler.engine.manifest import read_bos
from icc.compiler.frontend.load import load_graph
from icc.compiler.frontend.source.source import open_source
from icc.compiler.gates import gate_sequences
from icc.compiler.graph.together import run_together
from icc.compiler.sizes import read_size
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.quantize import auto
from icc.runtime.loading import open_llm
from icc.runtime.options import LoadOptions

Row = dict[str, Any]
SEQ_LEN = 1024  # the sizes of engines include position tables of this length
STATED = {
    "llama.cpp Q4_0": (91.7, 23.3), "llama.cpp IQ4_XS": (92.1, 16.2), "llama.cpp Q3_K_M": (93.5, 13.6),
    "llama.cpp Q4_K_M": (105.5, 6.1), "ik_llama.cpp IQ4_K": (102.0, 7.3),
}  # fmt: skip


def build(model: Path, folder: Path, wanted: dict[str, Row], calib: int) -> dict[str, Path]:
    """Compile the engines that are missing; the paths by name in the table."""
    engines: dict[str, Path] = {}
    auto.measure = _once(auto.measure)
    for name, options in wanted.items():
        engines[name] = folder / (name.replace(" ", "-") + ".engine")
        if not engines[name].exists():
            given = {"max_seq_len": SEQ_LEN, "calib_sequences": calib, **options}
            icc.compile(model, engines[name], target="native", **given)
            print(name, "built", flush=True)
    return engines


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which returns the result of its first call every time."""
    found: list[Any] = []

    def call(*args: Any) -> Any:
        if not found:
            found.append(function(*args))
        return found[0]

    return call


def measure(model: Path, windows: Sequence[Sequence[int]], engines: dict[str, Path]) -> dict[str, Row]:
    """Perplexity and KL divergence of each engine on the windows, against the model in float32."""
    graph = load_graph(model, SEQ_LEN)
    run_passes(graph, pipelines.canonicalize(), PassContext())
    nll, kl, base, scored, tokens = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0.0), 0.0, 0, 0
    with ExitStack() as stack:
        opened = {
            n: stack.enter_context(open_llm(LoadOptions(e, verify=False, spec="none"))) for n, e in engines.items()
        }
        for window in windows:
            [found] = run_together(graph, [window])
            wanted, following = torch.log_softmax(found.logits, -1), torch.tensor(window[1:]).unsqueeze(1)
            base -= float(wanted[:-1].gather(1, following).sum(dtype=torch.float64))
            scored, tokens = scored + len(window) - 1, tokens + len(window)
            for name, llm in opened.items():
                logits = torch.cat([torch.from_numpy(chunk.copy()) for chunk in llm.iter_logits(window)])
                logs = torch.log_softmax(logits, -1)
                nll[name] -= float(logs[:-1].gather(1, following).sum(dtype=torch.float64))
                kl[name] += float((wanted.exp() * (wanted - logs)).sum(dtype=torch.float64))
    return {
        name: {
            "perplexity": round(exp(nll[name] / scored), 4),
            "reference": round(exp(base / scored), 4),
            "increase": round(exp((nll[name] - base) / scored) - 1, 5),
            "kl": round(kl[name] / tokens, 5),
            "tokens": scored,
            **_report(engine),
        }
        for name, engine in engines.items()
    }


def _report(engine: Path) -> Row:
    report = json.loads((engine / "report.json").read_text())
    found = report.get("allocation")
    return {"bytes": report["weight_bytes"], "expected_kl": found and found["expected_kl"]}


def as_table(rows: dict[str, Row]) -> str:
    """The rows as a Markdown table, sorted by bytes."""
    lines = ["| | weights | perplexity | KL per token | expected |", "|---|---|---|---|---|"]
    for name, row in sorted(rows.items(), key=lambda item: item[1]["bytes"]):
        expected = "" if row.get("expected_kl") is None else f"{row['expected_kl']:.4f}"
        perplexity = f"{row['perplexity']:.3f} " if "perplexity" in row else ""
        perplexity += f"({100 * row['increase']:+.2f} %)"
        kl = f"{row['kl']:.4f}" if "kl" in row else ""
        lines.append(f"| {name} | {row['bytes'] / 1e6:.2f} MB | {perplexity} | {kl} | {expected} |")
    return "\n".join(lines) + "\n"


def draw(rows: dict[str, Row], file: Path) -> None:
    """Plot the frontier if matplotlib is installed."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure, axes = plt.subplots(figsize=(7, 4.5))
    auto_rows = sorted((r["bytes"] / 1e6, 100 * r["increase"]) for name, r in rows.items() if name.startswith("auto"))
    axes.plot(*zip(*auto_rows, strict=True), marker="o", label="icc --quant auto")
    for name, row in rows.items():
        if not name.startswith("auto"):
            x, y, peer = row["bytes"] / 1e6, 100 * row["increase"], "llama.cpp" in name
            axes.scatter(x, y, marker="x" if peer else "o", color="gray" if peer else "tab:blue")
            axes.annotate(name, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set_xlabel("weights, MB")
    axes.set_ylabel("rise of perplexity, %")
    axes.margins(x=0.15)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where engines are kept")
    parser.add_argument("--sizes", default="", help="sizes of --quant auto, comma-separated")
    parser.add_argument("--quant", default="", help="other methods, comma-separated")
    parser.add_argument("--without", default="", help="formats that auto may not choose, comma-separated")
    parser.add_argument("--label", default="", help="appended to the names of the rows of auto")
    parser.add_argument("--calib-sequences", type=int, default=32)
    parser.add_argument("--windows", type=int, help="number of windows, spread over the text; default: all")
    parser.add_argument("--stated", action="store_true", help="add the issue's figures of other engines")
    parser.add_argument("--write-windows", type=Path, metavar="FILE", help="for frontier_peers.py")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    excluded = args.without.split(",")
    auto.PALETTE = tuple(item for item in auto.PALETTE if item not in excluded)
    args.work.mkdir(parents=True, exist_ok=True)
    data = args.out.with_suffix(".json")
    rows: dict[str, Row] = json.loads(data.read_text()) if data.is_file() else {}
    wanted: dict[str, Row] = {quant: {"quant": quant} for quant in filter(None, args.quant.split(","))}
    for size in filter(None, args.sizes.split(",")):
        wanted[f"auto {size}{args.label}"] = {"quant": "auto", "size": read_size(size)}
    engines = build(args.model, args.work, wanted, args.calib_sequences)
    source = open_source(args.model)
    tokenizer, vocab_size = source.files / "tokenizer.json", source.config.get_text_config().vocab_size
    windows = gate_sequences(args.text, tokenizer, vocab_size, read_bos(source.files), SEQ_LEN)
    if args.windows:
        windows = windows[:: max(1, len(windows) // args.windows)][: args.windows]
    if args.write_windows:
        args.write_windows.write_text(json.dumps(windows))
    if engines:
        rows |= measure(args.model, windows, engines)
    if args.stated:
        for name, (size, rise) in STATED.items():
            rows[f"{name} (stated)"] = {"bytes": int(size * 1e6), "increase": round(rise / 100, 4), "stated": True}
    data.write_text(json.dumps(rows, indent=1) + "\n")
    table = as_table(rows)
    args.out.with_suffix(".md").write_text(table)
    draw(rows, args.out.with_suffix(".svg"))
    print(table)


if __name__ == "__main__":
    main()
