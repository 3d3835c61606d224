"""Bytes against quality: `--quant auto` at several sizes beside the uniform methods, on one text.

    python benchmarks/frontier.py MODEL --text FILE --sizes 80MB,92MB --quant gptq4 --out benchmarks/results/frontier

Every engine is compiled for this machine and measured as built, by its own gate (`--gate`), against MODEL in float32 in
windows of 512: perplexity, its increase, and the mean KL divergence per token. Writes OUT.json and OUT.md, and OUT.svg
where matplotlib is installed. Rows of an earlier OUT.json that are not measured again stay.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import icc

NO_BOUND = ("ppl=1e12",)


def measure(model: Path, text: Path, **options: Any) -> dict[str, Any]:
    """One engine: bytes of its weights, and what it loses."""
    with tempfile.TemporaryDirectory() as folder:
        engine = icc.compile(
            model,
            Path(folder) / "e.engine",
            target="native",
            gate=NO_BOUND,
            gate_text=text,
            max_seq_len=1024,
            **options,
        )
        gate = json.loads((engine / "engine.json").read_text())["gate"]
        report = json.loads((engine / "report.json").read_text())
    found = report.get("allocation")
    return {
        "bytes": report["weight_bytes"],
        "perplexity": gate["perplexity"],
        "reference": gate["reference_perplexity"],
        "increase": gate["perplexity_increase"],
        "kl": gate["kl"],
        "expected_kl": found and found["expected_kl"],
        "tokens": gate["tokens"],
    }


def as_table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown, by bytes."""
    lines = ["| | weights | perplexity | KL per token | expected |", "|---|---|---|---|---|"]
    for name, row in sorted(rows.items(), key=lambda item: item[1]["bytes"]):
        expected = "" if row.get("expected_kl") is None else f"{row['expected_kl']:.4f}"
        lines.append(
            f"| {name} | {row['bytes'] / 1e6:.2f} MB | {row['perplexity']:.3f} ({100 * row['increase']:+.2f} %) "
            f"| {row['kl']:.4f} | {expected} |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: dict[str, dict[str, Any]], file: Path) -> None:
    """The frontier as a picture, where matplotlib is installed."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    auto = sorted((r["bytes"] / 1e6, 100 * r["increase"]) for name, r in rows.items() if name.startswith("auto"))
    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.plot(*zip(*auto, strict=True), marker="o", label="icc --quant auto")
    for name, row in rows.items():
        if not name.startswith("auto"):
            axes.scatter(row["bytes"] / 1e6, 100 * row["increase"], label=name)
    axes.set_xlabel("weights, MB")
    axes.set_ylabel("rise of perplexity, %")
    axes.legend()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--sizes", default="", help="of --quant auto, with commas")
    parser.add_argument("--quant", default="", help="other methods, with commas")
    parser.add_argument("--calib-sequences", type=int, default=32)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    from icc.compiler.sizes import read_size

    data = args.out.with_suffix(".json")
    rows: dict[str, dict[str, Any]] = json.loads(data.read_text()) if data.is_file() else {}
    wanted: dict[str, dict[str, Any]] = {quant: {"quant": quant} for quant in filter(None, args.quant.split(","))}
    for size in filter(None, args.sizes.split(",")):
        wanted[f"auto {size}"] = {"quant": "auto", "size": read_size(size)}
    for name, options in wanted.items():
        rows[name] = measure(args.model, args.text, calib_sequences=args.calib_sequences, **options)
        data.write_text(json.dumps(rows, indent=1) + "\n")
        print(name, rows[name], flush=True)
    table = as_table(rows)
    args.out.with_suffix(".md").write_text(table)
    draw(rows, args.out.with_suffix(".svg"))
    print(table)


if __name__ == "__main__":
    main()
