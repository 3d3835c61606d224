"""icc on this machine's NVIDIA GPU: correctness, then speed against the hardware's limits and against transformers.

    python benchmarks/gpu.py --target h200 --shapes llama-1b,llama-8b --quants none,awq4 --out results/gpu-h200

Everything is measured in one run: the GPU's copy bandwidth and bf16 matmul peak; decode tokens/s at batch 1, 8, 32 and
128 and prefill tokens/s of 2,048 tokens; the same work by transformers with a static cache and torch.compile, and by
its continuous batching. Checkpoints have random weights; they and the engines are written to --work and reused.
Before it is timed, each engine's logits are compared with transformers' in float32 on the same GPU (`none`), or with
the unquantized engine's (4 bits: only the order of magnitude of the error says something on random weights).

Needs torch with CUDA, transformers, triton, cuda-bindings, and icc on the path. Writes OUT.json and OUT.svg.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import icc
import numpy as np
import torch
from icc.runtime.bench import BenchOptions, run_bench
from make_model import write

BATCHES = (1, 8, 32, 128)
PREFILL = 2048
DECODE_CONTEXT = 128
OUTPUT = 128


def main() -> None:
    """Measure all shapes and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--shapes", default="llama-1b,llama-8b")
    parser.add_argument("--quants", default="none,awq4")
    parser.add_argument("--work", type=Path, default=Path("build/gpu"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peers", action="store_true", help="icc alone")
    a = parser.parse_args()
    results: dict[str, Any] = {"date": date.today().isoformat(), "versions": versions(), "device": device_limits()}
    print(json.dumps(results, indent=1), flush=True)
    for shape in a.shapes.split(","):
        model = a.work / shape
        if not (model / "model.safetensors").is_file():
            write(shape, model)
        rows = results.setdefault("rows", [])
        for quant in a.quants.split(","):
            engine = compile_engine(model, a.work / f"{shape}-{quant}.engine", a.target, quant)
            rows += measure_engine(engine, shape, quant, model, results["device"], a.rounds)
            save(results, a.out)
        if not a.no_peers:
            for peer in (static_cache, continuous_batching):
                rows += attempt(peer, model, shape)
                save(results, a.out)
    print(as_table(results))
    plot(results, a.out.with_suffix(".svg"))


def versions() -> dict[str, str]:
    """What the run depends on."""
    from importlib.metadata import version

    names = ("torch", "transformers", "triton", "cuda-bindings")
    return {"icc": icc.__version__, "python": sys.version.split()[0]} | {name: version(name) for name in names}


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


def seconds(work: Callable[[], Any], rounds: int = 20) -> float:
    """Median seconds of some work on the device."""
    for _ in range(3):
        work()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def compile_engine(model: Path, engine: Path, target: str, quant: str) -> Path:
    """Compile unless it is there."""
    if not (engine / "engine.json").is_file():
        start = time.perf_counter()
        icc.compile(
            model, engine, target=target, quant=quant, max_seq_len=PREFILL + OUTPUT, max_batch_size=max(BATCHES),
            max_step_tokens=PREFILL, calib_sequences=8, calib_length=256,
        )  # fmt: skip
        print(f"compiled {engine.name} in {time.perf_counter() - start:.0f} s", flush=True)
    return engine


def measure_engine(
    engine: Path, shape: str, quant: str, model: Path, device: dict[str, Any], rounds: int
) -> list[dict[str, Any]]:
    """One row per batch size, and one of prefill, each with its share of the limit."""
    start = time.perf_counter()
    with icc.load(engine, verify=False) as llm:
        prompt = np.random.default_rng(0).integers(3, 1000, 16).tolist()
        llm.generate([prompt], icc.SamplingParams(max_tokens=1, ignore_eos=True))
        first = time.perf_counter() - start
        error = logits_error(llm, model) if quant == "none" else None
        streamed = streamed_bytes(llm)
        base = {"engine": "icc", "shape": shape, "quant": quant, "first_token_s": first, "logits_error": error}
        rows = []
        for result in run_bench(llm, BenchOptions(DECODE_CONTEXT, OUTPUT, BATCHES, rounds)):
            kv = result.batch_size * (DECODE_CONTEXT + OUTPUT // 2) * kv_bytes_per_token(llm)
            limit = result.batch_size * device["copy_gb_s"] * 1e9 / (streamed + kv)
            rate = result.decode_tokens_per_s
            rows.append(base | {"batch": result.batch_size, "decode_tok_s": rate, "of_bandwidth": rate / limit})
        prefill = run_bench(llm, BenchOptions(PREFILL, 1, (1,), rounds))[0].prefill_tokens_per_s
        flops = 2 * llm.manifest.model.num_parameters
        share = prefill * flops / (device["matmul_tflop_s"] * 1e12)
        rows.append(base | {"prefill_tok_s": prefill, "of_matmul_peak": share})
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def streamed_bytes(llm: icc.LLM) -> int:
    """Bytes of weights that a decode step reads: all that products read; of an embedding only rows are read."""
    assert llm.engine is not None
    program = llm.engine.program
    read = {
        operand.name
        for step in program.steps
        if program.kernels[step.kernel].op != "embedding"
        for operand in step.inputs
        if operand.space == "weight"
    }
    return sum(program.weights[name].nbytes for name in read)


def kv_bytes_per_token(llm: icc.LLM) -> float:
    """Bytes of KV per token over all layers."""
    assert llm.engine is not None
    kv = llm.engine.program.kv
    return kv.total_block_bytes() / kv.block_size


def logits_error(llm: icc.LLM, model: Path) -> float:
    """Largest difference from transformers' float32 logits, relative to the largest of them."""
    from transformers import AutoModelForCausalLM

    ids = np.random.default_rng(1).integers(3, 1000, 64).tolist()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).cuda()
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([ids], device="cuda"), use_cache=False).logits[0].cpu().numpy()
    del reference
    torch.cuda.empty_cache()
    return float(np.abs(llm.logits(ids) - expected).max() / np.abs(expected).max())


def static_cache(model: Path, shape: str) -> list[dict[str, Any]]:
    """transformers.generate with a static cache, its decode step compiled by torch.compile."""
    peer = _transformers(model)
    rows = []
    for batch in BATCHES:
        ids = torch.randint(3, 1000, (batch, DECODE_CONTEXT), device="cuda")

        def generate(count: int, ids: torch.Tensor = ids) -> None:
            options = {"cache_implementation": "static", "do_sample": False, "eos_token_id": None}
            peer.generate(ids, min_new_tokens=count, max_new_tokens=count, **options)

        for _ in range(2):  # compiles
            generate(OUTPUT)
        long, short = (_wall(partial(generate, count)) for count in (OUTPUT, 1))
        rate = batch * (OUTPUT - 1) / (long - short)
        rows.append({"engine": "transformers static", "shape": shape, "batch": batch, "decode_tok_s": rate})
    ids = torch.randint(3, 1000, (1, PREFILL), device="cuda")
    with torch.no_grad():
        rate = PREFILL / seconds(lambda: peer(input_ids=ids, use_cache=True, logits_to_keep=1), 5)
    return [*rows, {"engine": "transformers static", "shape": shape, "prefill_tok_s": rate}]


def continuous_batching(model: Path, shape: str) -> list[dict[str, Any]]:
    """transformers' own continuous batching (generate_batch)."""
    from transformers import GenerationConfig

    peer = _transformers(model)
    rows = []
    for batch in BATCHES:
        prompts = torch.randint(3, 1000, (batch, DECODE_CONTEXT)).tolist()
        options = GenerationConfig(max_new_tokens=OUTPUT, do_sample=False, eos_token_id=-1, pad_token_id=0)
        peer.generate_batch(inputs=prompts, generation_config=options)
        took = _wall(lambda p=prompts, o=options: peer.generate_batch(inputs=p, generation_config=o))
        rows.append(
            {"engine": "transformers batching", "shape": shape, "batch": batch, "decode_tok_s": batch * OUTPUT / took}
        )
    return rows


def _transformers(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.cuda.empty_cache()
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda().eval()


def _wall(work: Callable[[], Any]) -> float:
    """Median wall seconds of three runs."""
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def attempt(peer: Callable[[Path, str], list[dict[str, Any]]], model: Path, shape: str) -> list[dict[str, Any]]:
    """A peer that fails is reported, not hidden."""
    try:
        return peer(model, shape)
    except Exception as error:
        print(f"{peer.__name__} failed on {shape}: {type(error).__name__}: {error}", flush=True)
        return [{"engine": peer.__name__, "shape": shape, "failed": f"{type(error).__name__}: {error}"[:300]}]
    finally:
        torch.cuda.empty_cache()


def save(results: dict[str, Any], out: Path) -> None:
    """What is known so far: a run that is cut off keeps it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


def as_table(results: dict[str, Any]) -> str:
    """The results for people."""
    device = results["device"]
    lines = [f"{device['name']}: copy {device['copy_gb_s']:.0f} GB/s, matmul {device['matmul_tflop_s']:.0f} TFLOP/s"]
    for row in results["rows"]:
        what = f"decode b{row['batch']}" if "batch" in row else "prefill"
        rate = row.get("decode_tok_s") or row.get("prefill_tok_s") or 0.0
        share = row.get("of_bandwidth") or row.get("of_matmul_peak")
        shown = "" if share is None else f"{share:6.1%} of the limit"
        quant = row.get("quant", "bf16")
        lines.append(f"{row['shape']:10} {row['engine']:22} {quant:5} {what:12} {rate:10.1f} tok/s {shown}")
    return "\n".join(lines)


def plot(results: dict[str, Any], file: Path) -> None:
    """Decode rate over batch size, one panel per shape."""
    import matplotlib.pyplot as plt

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
    main()
