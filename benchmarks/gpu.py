"""icc on this machine's NVIDIA GPU: correctness, then speed against the hardware's limits and transformers.

    python benchmarks/gpu.py --target h200 --shapes llama-1b --quants none,awq4 --out results/gpu-h200-1b
    python benchmarks/gpu.py --target h200 --shapes llama-8b --quants none,rtn4 --engines icc --out results/gpu-h200-8b
    python benchmarks/gpu.py --target h200 --shapes llama-8b --engines static,batching --out results/gpu-h200-8b-peers

Everything is measured in one run: the GPU's copy bandwidth and bf16 matmul peak; decode tokens/s at batch 1, 8, 32 and
128 and prefill tokens/s of 2,048 tokens; the same work by transformers with a static cache and torch.compile, and by
its continuous batching. Checkpoints have random weights; they and the engines are written to --work and reused, so that
a run that exceeded --minutes can be repeated. On random weights rtn4 is as fast as awq4 and needs no calibration.
Before it is timed, each engine's logits are compared with transformers' in float32 on the same GPU (`none`), or with
the unquantized engine's (4 bits: with random weights only the order of magnitude of the error is meaningful).

Needs torch with CUDA, transformers, triton, cuda-bindings, and icc on the path. Writes OUT.json after every stage, and
OUT.svg if matplotlib is installed. A stage that fails gives a row with the error; if it is icc's, the status is 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import icc
import numpy as np
import torch
from gpu_peers import BATCHES, DECODE_CONTEXT, OUTPUT, PEERS, PREFILL, seconds
from icc.compiler.program.program import program_of
from icc.compiler.program.steps.embedding import Embedding
from icc.compiler.program.steps.linear import RowProduct
from icc.runtime.commands.bench import BenchOptions, run_bench
from icc.runtime.format.operands import WeightOperand
from make_model import write

ENGINE_LIMITS = {"max_seq_len": PREFILL + OUTPUT, "max_batch_size": max(BATCHES), "max_step_tokens": PREFILL}
KV_BYTES = 16 << 30  # holds all batches, and leaves memory for the 8B reference in float32


def main() -> int:
    """Measure all stages and write the results."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--shapes", default="llama-1b,llama-8b")
    parser.add_argument("--quants", default="none,awq4")
    parser.add_argument("--engines", default="icc,static,batching", help="icc, and the peers: static, batching")
    parser.add_argument("--work", type=Path, default=Path("build/gpu"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=1e9, help="start no stage after this many minutes")
    parser.add_argument("--no-reference", action="store_true", help="only times: logits are not compared")
    a = parser.parse_args()
    results: dict[str, Any] = {"date": date.today().isoformat(), "versions": versions(), "device": device_limits()}
    print(json.dumps(results, indent=1), flush=True)
    rows: list[dict[str, Any]] = results.setdefault("rows", [])
    for facts, work in stages(a, results["device"]):
        late = time.monotonic() - begin > 60 * a.minutes
        found = [{"failed": "no time was left"}] if late else attempt(work)
        for row in found:
            rows.append(facts | row)
            print(json.dumps(rows[-1]), flush=True)
        save(results, a.out)
    print(as_table(results))
    plot(results, a.out.with_suffix(".svg"))
    return int(any("failed" in row and row["engine"] == "icc" for row in rows))


Stage = tuple[dict[str, Any], Callable[[], list[dict[str, Any]]]]


def stages(a: argparse.Namespace, device: dict[str, Any]) -> Iterator[Stage]:
    """Yield the stages in order: the fields that all rows of a stage share, and the work that returns its rows."""
    engines = a.engines.split(",")
    for shape in a.shapes.split(","):
        model = a.work / shape
        if not (model / "model.safetensors").is_file():
            yield {"engine": "checkpoint", "shape": shape}, partial(write_checkpoint, shape, model)
        for quant in a.quants.split(",") if "icc" in engines else ():
            engine = a.work / f"{shape}-{quant}.engine"
            yield (
                {"engine": "icc", "shape": shape, "quant": quant},
                partial(measure_engine, engine, a.target, quant, model, device, a.rounds, not a.no_reference),
            )
        for name, peer in PEERS.items():
            if name in engines:
                yield {"engine": f"transformers {name}", "shape": shape}, partial(peer, model)


def write_checkpoint(shape: str, model: Path) -> list[dict[str, Any]]:
    """Write a checkpoint, first under another name, so that an incomplete one is never reused."""
    start, part = time.perf_counter(), model.with_name(f"{model.name}.part")
    write(shape, part, device="cuda")
    part.rename(model)
    return [{"written_s": time.perf_counter() - start}]


def versions() -> dict[str, str]:
    """Versions of icc, Python and the packages that the run depends on, by name."""
    known = {found.metadata["Name"]: found.version for found in distributions()}
    names = ("torch", "transformers", "triton", "cuda-bindings")
    return {"icc": icc.__version__, "python": sys.version.split()[0]} | {n: known.get(n, "none") for n in names}


def device_limits() -> dict[str, Any]:
    """The GPU's name, copy bandwidth in GB/s (bytes read and written) and bf16 matmul rate in TFLOP/s."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = seconds(lambda to=target, origin=source: to.copy_(origin))
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    right = torch.randn_like(left)
    product = seconds(lambda: left @ right)
    found = {"name": torch.cuda.get_device_name(), "copy_gb_s": 2 * (2 << 30) / copy / 1e9}
    del source, target
    torch.cuda.empty_cache()
    return found | {"matmul_tflop_s": 2 * 8192**3 / product / 1e12}


def compile_engine(model: Path, engine: Path, target: str, quant: str) -> Path:
    """Compile an engine unless it exists; its path."""
    if not (engine / "engine.json").is_file():
        start = time.perf_counter()
        icc.compile(model, engine, target=target, quant=quant, calib_sequences=8, calib_length=256, **ENGINE_LIMITS)
        print(f"compiled {engine.name} in {time.perf_counter() - start:.0f} s", flush=True)
    return engine


def measure_engine(
    engine: Path, target: str, quant: str, model: Path, device: dict[str, Any], rounds: int, compared: bool
) -> list[dict[str, Any]]:
    """One row per batch size, and one of prefill, each with its share of the limit."""
    compile_engine(model, engine, target, quant)
    start = time.perf_counter()
    with icc.load(engine, verify=False, kv_bytes=KV_BYTES) as llm:
        prompt = np.random.default_rng(0).integers(3, 1000, 16).tolist()
        llm.generate([prompt], icc.SamplingParams(max_tokens=1, ignore_eos=True))
        first = time.perf_counter() - start
        error = logits_error(llm, model) if quant == "none" and compared else None
        streamed = streamed_bytes(llm)
        base = {"first_token_s": first, "logits_error": error}
        rows = []
        for result in run_bench(llm, BenchOptions(DECODE_CONTEXT, OUTPUT, BATCHES, rounds)):
            kv = result.batch_size * (DECODE_CONTEXT + OUTPUT // 2) * kv_bytes_per_token(llm)
            limit = result.batch_size * device["copy_gb_s"] * 1e9 / (streamed + kv)
            rate = result.decode_tokens_per_s
            rows.append(base | {"batch": result.batch_size, "decode_tok_s": rate, "of_bandwidth": rate / limit})
        prefill = run_bench(llm, BenchOptions(PREFILL, 1, (1,), rounds))[0].prefill_tokens_per_s
        share = prefill * prefill_flops(llm) / (device["matmul_tflop_s"] * 1e12)
        return [*rows, base | {"prefill_tok_s": prefill, "of_matmul_peak": share}]


def streamed_bytes(llm: icc.LLM) -> int:
    """Bytes of weights that a decode step reads: all weights of products; the few rows of an embedding do not count."""
    assert llm.engine is not None
    program = program_of(llm.engine)
    read = {
        operand.name
        for step in program.steps
        if not isinstance(step, Embedding)
        for operand in step.operands.values()
        if isinstance(operand, WeightOperand)
    }
    return sum(program.weights[name].nbytes for name in read)


def prefill_flops(llm: icc.LLM) -> float:
    """Operations per prompt token in products with weights, without the head, which runs for few tokens."""
    assert llm.engine is not None
    steps = program_of(llm.engine).steps
    return 2.0 * sum(step.n * step.k for step in steps if isinstance(step, RowProduct) and step.rows == "tokens")


def kv_bytes_per_token(llm: icc.LLM) -> float:
    """Bytes of KV per token over all layers."""
    assert llm.engine is not None
    return llm.engine.program.kv.bytes_per_token()


def logits_error(llm: icc.LLM, model: Path) -> float:
    """The largest difference from transformers' float32 logits, relative to the largest logit."""
    from transformers import AutoModelForCausalLM

    ids = np.random.default_rng(1).integers(3, 1000, 64).tolist()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).cuda()
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([ids], device="cuda"), use_cache=False).logits[0].cpu().numpy()
    del reference
    torch.cuda.empty_cache()
    return float(np.abs(llm.logits(ids) - expected).max() / np.abs(expected).max())


def attempt(work: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of a stage; if it fails, one row with the error, so that the run continues."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        return [{"failed": f"{type(error).__name__}: {error}"[:300]}]
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def save(results: dict[str, Any], out: Path) -> None:
    """Write the results so far as JSON, for runs that are interrupted."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


def as_table(results: dict[str, Any]) -> str:
    """The results as a text table."""
    device = results["device"]
    lines = [f"{device['name']}: copy {device['copy_gb_s']:.0f} GB/s, matmul {device['matmul_tflop_s']:.0f} TFLOP/s"]
    for row in results["rows"]:
        if "failed" in row or "written_s" in row:
            lines.append(f"{row['shape']:10} {row['engine']:22} {row.get('failed', 'written')}")
            continue
        what = f"decode b{row['batch']}" if "batch" in row else "prefill"
        rate = row.get("decode_tok_s") or row.get("prefill_tok_s") or 0.0
        share = row.get("of_bandwidth") or row.get("of_matmul_peak")
        shown = "" if share is None else f"{share:6.1%} of the limit"
        quant = row.get("quant", "bf16")
        lines.append(f"{row['shape']:10} {row['engine']:22} {quant:5} {what:12} {rate:10.1f} tok/s {shown}")
    return "\n".join(lines)


def plot(results: dict[str, Any], file: Path) -> None:
    """Decode rate over batch size, one panel per shape."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    shapes = sorted({row["shape"] for row in results["rows"]})
    figure, axes = plt.subplots(1, len(shapes), figsize=(6 * len(shapes), 4), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        series: dict[str, list[tuple[int, float]]] = {}
        for row in results["rows"]:
            if row["shape"] == shape and "decode_tok_s" in row:
                name = f"{row['engine']} {row.get('quant', 'bf16')}"
                series.setdefault(name, []).append((row["batch"], row["decode_tok_s"]))
        for name, points in series.items():
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set(title=shape, xlabel="batch size", ylabel="decode tokens/s", xscale="log", yscale="log")
        axis.legend()
    figure.savefig(file)


if __name__ == "__main__":
    sys.exit(main())
