"""Decode and prefill speed of the CPU backend on a synthetic Llama-3.2-1B shape: random weights, no model needed.

PYTHONPATH=/work/pkg python tests/codegen/bench_cpu.py [--isa avx512vnni] [--threads 2] [--format q4|bf16] [--layers 16]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from cpu_harness import NONE, Batch, Builder, Runner
from icc.compiler.codegen.cpu import pack
from icc.compiler.codegen.cpu.build import build_libraries
from icc.compiler.codegen.cpu.isa import ALL, host_isas
from icc.runtime.engine.program import KVLayer, Operand

HIDDEN, HEADS, KV_HEADS, DIM, FFN, VOCAB, GROUP, BLOCK, POSITIONS = 2048, 32, 8, 64, 8192, 128256, 128, 16, 8192


def random_weight(b: Builder, name: str, n: int, k: int, fmt: str) -> Operand:
    """A weight of n rows whose first 256 rows repeat: packing gigabytes of random numbers would take minutes."""
    rng, rows = np.random.default_rng(0), min(n, 256)
    if fmt == "bf16":
        packed = pack.pack_dense(rng.standard_normal((rows, k)).astype(np.float32) * 0.02, "tile_bf16")
    else:
        bits = int(fmt[1:])
        codes = rng.integers(0, 2**bits, (rows, k)).astype(np.uint8)
        scales = np.full((rows, k // GROUP), 0.02 / 2 ** (bits - 2), np.float32)
        packed = pack.pack_quantized(codes, scales, np.full(scales.shape, 2 ** (bits - 1), np.uint8), bits, GROUP)
    return b.weight(name, np.tile(packed, n // rows), fmt, (n, k))


def linear(b: Builder, x: Operand, name: str, n: int, k: int, fmt: str, y: Operand, residual: Operand = NONE,
           rows: str = "tokens") -> None:  # fmt: skip
    """y = x W^T (+ residual), quantizing x first where W is quantized."""
    has = residual is not NONE
    if fmt == "bf16":
        params = {"k": k, "n": n, "format": fmt, "rows": rows, "has_residual": has}
        b.step("linear", params, [x, random_weight(b, name, n, k, fmt), NONE, residual], [y])
        return
    q = [b.buffer(f"{name}.q", [k], "i8", rows), b.buffer(f"{name}.s", [k // GROUP], rows=rows)]
    q.append(b.buffer(f"{name}.sum", [k // GROUP], rows=rows))
    b.step("quantize_rows", {"k": k, "group": GROUP, "rows": rows}, [x], q)
    params = {"k": k, "n": n, "bits": int(fmt[1:]), "group": GROUP, "rows": rows, "has_residual": has}
    b.step("linear_q", params, [*q, random_weight(b, name, n, k, fmt), NONE, residual], [y])


def part(operand: Operand, offset: int) -> Operand:
    """The same buffer, `offset` columns further."""
    return Operand("buffer", operand.name, offset)


def build(fmt: str, layers: int, kv: str) -> Builder:
    b = Builder(BLOCK, kv)
    b.vocab = VOCAB
    ones = b.plain("ones", np.ones(HIDDEN, np.float32))
    table = b.plain("table", np.random.default_rng(0).standard_normal((POSITIONS, DIM)).astype(np.float32))
    cache = {"kv_heads": KV_HEADS, "key_dim": DIM, "value_dim": DIM, "dtype": kv, "block_size": BLOCK,
                 "rotary_dim": DIM,
                 "rope_style": "half", "table_rows": POSITIONS}  # fmt: skip
    h = b.buffer("h", [HIDDEN])
    embedding = b.plain("embedding", np.zeros((4096, HIDDEN), np.float32), "bf16")
    b.step(
        "embedding",
        {"n": HIDDEN, "table_rows": 4096, "format": "bf16"},
        [Operand("input", "token_ids"), embedding],
        [h],
    )
    norm, qkv_width = {"d": HIDDEN, "eps": 1e-5}, (HEADS + 2 * KV_HEADS) * DIM
    x, qkv, o = b.buffer("x", [HIDDEN]), b.buffer("qkv", [qkv_width]), b.buffer("o", [HIDDEN])
    gate_up, act = b.buffer("gate_up", [2 * FFN]), b.buffer("act", [FFN])
    for i in range(layers):
        b.layers.append(KVLayer(KV_HEADS, DIM, DIM))
        b.step("rms_norm", norm, [h, ones], [x])
        linear(b, x, f"qkv{i}", qkv_width, HIDDEN, fmt, qkv)
        keys = [part(qkv, HEADS * DIM), part(qkv, (HEADS + KV_HEADS) * DIM)]
        b.step("kv_write", cache | {"k_stride": qkv_width, "v_stride": qkv_width}, [*keys, table, table], [], i)
        params = cache | {"q_heads": HEADS, "q_stride": qkv_width, "o_stride": HIDDEN, "scale": 0.125}
        b.step("attention", params, [qkv, table, table, NONE, NONE], [o], i)
        linear(b, o, f"o{i}", HIDDEN, HIDDEN, fmt, h, h)
        b.step("rms_norm", norm, [h, ones], [x])
        linear(b, x, f"up{i}", 2 * FFN, HIDDEN, fmt, gate_up)
        chain = {"shape": [FFN], "inputs": [f"f32:{2 * FFN}:1"] * 2, "body": ["t0 = silu a0", "t1 = mul t0 a1"],
                     "outputs": [f"t1:f32:{FFN}:1"]}  # fmt: skip
        b.step("pointwise", chain, [gate_up, part(gate_up, FFN)], [act])
        linear(b, act, f"down{i}", HIDDEN, FFN, fmt, h, h)
    last = b.buffer("last", [HIDDEN], rows="logit_rows")
    b.step("select_rows", {"n": HIDDEN, "x_stride": HIDDEN}, [h], [last])
    b.step("rms_norm", norm | {"rows": "logit_rows"}, [last, ones], [last])
    linear(
        b,
        last,
        "head",
        VOCAB,
        HIDDEN,
        "bf16" if fmt == "bf16" else "q8",
        Operand("output", "logits"),
        rows="logit_rows",
    )
    seen: dict[str, str] = {}  # equal kernels share one function, as the compiler's programs do
    names = {name: seen.setdefault(repr(kernel), name) for name, kernel in b.kernels.items()}
    b.steps = [type(s)(names[s.kernel], s.inputs, s.outputs, s.layer) for s in b.steps]
    b.kernels = {name: kernel for name, kernel in b.kernels.items() if names[name] == name}
    return b


def measure(runner: Runner, batch: Batch, rounds: int, clock: Callable[[], float]) -> float:
    """Median seconds of one step."""
    runner.step(batch, {})
    times = []
    for _ in range(rounds):
        start = clock()
        runner.step(batch, {})
        times.append(clock() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--isa", default=host_isas()[0].name)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--format", default="q4")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--cpu-time", action="store_true", help="with --threads 1: not disturbed by other processes")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    builder = build(args.format, args.layers, args.kv)
    isa = next(isa for isa in ALL if isa.name == args.isa)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        (library,) = build_libraries(builder.program(), Path(folder) / "kernels", [isa])
        print(f"{isa.name} {args.format} threads={args.threads}: g++ {time.perf_counter() - start:.1f} s")
        runner = Runner(Path(folder) / library.path, builder, args.threads, 512, num_blocks=16 * 40, poison=0)
    gigabytes = (
        sum(w.size for name, w in zip(builder.weights, runner.weights, strict=True) if name != "embedding") / 1e9
    )
    tables = [[40 * s + i for i in range(40)] for s in range(16)]
    for size in (1, 2, 4, 8, 16):
        batch = Batch([(100, 1, table) for table in tables[:size]], BLOCK, np.zeros(size, np.int32))
        seconds = measure(runner, batch, 7 if size < 8 else 4, clock)
        rate = f"{size / seconds:7.1f} tok/s  {seconds * 1e3:7.1f} ms  {gigabytes / seconds:5.1f} GB/s"
        print(f"  decode b{size:<3} {rate}")
    one = Batch([(500, 1, tables[0])], BLOCK, np.zeros(1, np.int32))
    print(f"  decode b1 at 500 {1 / measure(runner, one, 7, clock):7.1f} tok/s")
    far = Batch([(4000, 1, list(range(251)))], BLOCK, np.zeros(1, np.int32))
    print(f"  decode b1 at 4000 {1 / measure(runner, far, 5, clock):6.1f} tok/s")
    prefill = Batch([(0, 512, tables[0])], BLOCK, np.zeros(512, np.int32), np.array([511]))
    seconds = measure(runner, prefill, 3, clock)
    print(f"  prefill 512   {512 / seconds:7.1f} tok/s  {seconds * 1e3:7.1f} ms")
    runner.close()


if __name__ == "__main__":
    main()
