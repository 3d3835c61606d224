"""Drives sanitized libraries, FOLDER/<program>/<isa>.so, with the sanitizer preloaded.

python run_sanitized.py all FOLDER ISA THREADS         every program in the folder
python run_sanitized.py withheld FOLDER ISA THREADS    "ops" with a fence where a kernel may write
python run_sanitized.py small FOLDER ISA THREADS       two products only
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from cpu_attention import LENGTHS, MIXED, SHAPES, build_model, play, sequence
from cpu_cases import add_linear_q
from cpu_choosing import choosing
from cpu_harness import Batch, Builder, Runner, flat_batch
from cpu_program import all_ops, feeds_of
from cpu_states import all_states, split

CACHES = {"f32": (16, SHAPES), "bf16": (32, SHAPES[:3]), "f16": (48, SHAPES[:3]), "i8": (16, SHAPES[:3])}
LONG = 1201  # a context of two segments, which the threads share


def programs() -> dict[str, Builder]:
    """All kernels: all ops, recurrent layers, an index, and attention over each cache type."""
    attention = {dtype: build_model(dtype, size, shapes) for dtype, (size, shapes) in CACHES.items()}
    models = {f"attention_{dtype}": model.builder for dtype, model in attention.items()}
    return {"ops": all_ops(), "states": all_states(), "choosing": choosing("i8"), **models}


def small_program() -> Builder:
    """A product whose threads read rows that other threads have quantized."""
    b = Builder()
    add_linear_q(b, np.random.default_rng(0), 32, 33, "q4", 16, False)
    return b


def run_ops(path: Path, b: Builder, threads: int, withheld: str | None = None) -> None:
    for tokens, team in ((1, 1), (3, threads), (17, threads)):
        runner = Runner(path, b, team)
        if withheld:
            runner.withheld[withheld] = 4
        batch = flat_batch(tokens)
        runner.step(batch, feeds_of(b, batch))
        batch.logit_rows, batch.greedy = np.zeros(0, np.int32), True
        runner.step(batch, feeds_of(b, batch))
        runner.close()


def run_states(path: Path, b: Builder, threads: int) -> None:
    runner, table = Runner(path, b, threads, num_blocks=6), [3, 0, 5, 1]
    split(runner, feeds_of(b, Batch([(0, 37, table)], b.block_size)), [20, 21, 24, 36, 37], table)
    runner.close()


def run_attention(path: Path, b: Builder, threads: int) -> None:
    runner = Runner(path, b, threads, 160, num_blocks=LONG // b.block_size + 1)
    play(runner, LENGTHS, MIXED)
    runner.kv[:] = 0
    table = np.random.default_rng(0).permutation(runner.num_blocks).tolist()
    runner.step(Batch([(LONG - 1, 1, table)], b.block_size), sequence(runner.program, 1, 0))
    runner.close()


def main(what: str, folder: Path, isa: str, threads: int) -> None:
    if what == "small":
        run_ops(folder / "small" / f"{isa}.so", small_program(), threads)
    elif what == "withheld":
        run_ops(folder / "ops" / f"{isa}.so", all_ops(), threads, "silu_mul.y")
    else:
        for name, builder in programs().items():
            if not (folder / name).exists():
                continue
            run = {"ops": run_ops, "states": run_states}.get(name, run_attention)
            run(folder / name / f"{isa}.so", builder, threads)
    print("clean")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
