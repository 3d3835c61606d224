"""Where a step spends its time: an engine's own kernels, each timed inside the step.

    python benchmarks/cpu/stages.py ENGINE [--isa avx512vnni] [--batch 1,8] [--context 128] [--chunk 512] [--threads 2]

The engine's program is rendered by this checkout with a clock around each kernel and each barrier; thread 0's times are
shown, summed over the steps that run the same kernel. Each case is run several times, and the fastest run is shown.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from icc.compiler.backends.cpu.emit import emit_source
from icc.compiler.backends.cpu.isa import ALL
from icc.compiler.backends.cpu.toolchain import compile_commands
from icc.compiler.program.program import Program, program_of
from icc.runtime.batch.scheduled import ScheduledBatch, ScheduledSequence
from icc.runtime.batch.tables import plain_tables
from icc.runtime.executor.cpu import library as kernel_library
from icc.runtime.executor.cpu.device import CpuDevice
from icc.runtime.executor.player import Player
from icc.runtime.format.load import open_engine
from icc.runtime.format.operands import WeightOperand
from icc.runtime.kv.config import GroupConfig

_RUN = "step.run(c);"
_WAIT = "h.barrier.wait(tid);"
_CLOCK = """#include <time.h>
extern "C" __attribute__((visibility("default"))) double icc_times[4096][2] = {};
static double now() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
"""


def timed_source(source: str) -> str:
    """Change a rendered source so that it adds thread 0's kernel and barrier seconds to `icc_times[step]`."""
    assert source.count(_RUN) == 1
    head, tail = source.split(_RUN)
    wait = tail.index(_WAIT)
    tail = tail[:wait] + "const double mid = now();\n" + _WAIT + (
        "\nif (!tid) icc_times[s][0] += mid - begin, icc_times[s][1] += now() - mid;" + tail[wait + len(_WAIT) :]
    )  # fmt: skip
    return _CLOCK + head + "const double begin = now();\n" + _RUN + tail


def load_timed(engine: Path, isa_name: str, threads: int) -> tuple[Player, Program, np.ndarray]:
    """An executor over the timed kernels, its program, and its array of times [steps, 2] in seconds."""
    isa = next(i for i in ALL if i.name == isa_name)
    opened = open_engine(engine, verify=False, isa=isa_name)
    program = program_of(opened)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "t.cpp").write_text(timed_source(emit_source(program, isa)))
        for command in compile_commands(isa, "t.cpp", "t.so", None, "-O3"):
            subprocess.run(command, cwd=folder, check=True)
        image = (Path(folder) / "t.so").read_bytes()
    opened.files.read = lambda path: image  # type: ignore[method-assign]
    device = CpuDevice(opened, threads=threads)
    ctypes.memset(device._kv.address, 0x2C, device.cache.nbytes)  # untouched pages would all be one page of zeros
    path = kernel_library.loadable_path(image, "t.so")
    raw = (ctypes.c_double * (4096 * 2)).in_dll(ctypes.CDLL(path), "icc_times")
    return Player(device), program, np.frombuffer(raw, dtype=np.float64).reshape(4096, 2)


def decodes(groups: Sequence[GroupConfig], count: int, context: int) -> list[ScheduledSequence]:
    """`count` sequences that decode one token each."""
    length = context + 1
    tables = [plain_tables(groups, length, *[length] * i) for i in range(count)]
    return [ScheduledSequence(i, (17,), context, tables[i], num_logits=1) for i in range(count)]


def show(title: str, executor, program, times: np.ndarray, batch: ScheduledBatch, runs: int) -> None:
    """Run and print one case."""
    best: np.ndarray | None = None
    for _ in range(runs):
        times[:] = 0
        executor.step(batch)
        if best is None or times.sum() < best.sum():
            best = times.copy()
    assert best is not None
    total = best.sum()
    print(f"\n{title}: {total * 1e3:.2f} ms, of which waiting {best[:, 1].sum() * 1e3:.2f} ms")
    groups: dict[str, list[int]] = defaultdict(list)
    for i, step in enumerate(program.steps):
        groups[step.kernel].append(i)
    for name, steps in sorted(groups.items(), key=lambda g: -best[g[1]].sum()):
        run, wait = best[steps].sum(axis=0)
        size = sum(
            program.weights[o.name].nbytes
            for i in steps
            for o in program.steps[i].operands.values()
            if isinstance(o, WeightOperand)
        )
        first = program.steps[steps[0]]
        shown = {k: getattr(first, k) for k in ("k", "n", "bits", "q_heads", "d") if hasattr(first, k)}
        time = f"{run * 1e3:8.3f} ms + wait {wait * 1e3:6.3f}  {100 * (run + wait) / total:5.1f} %"
        print(f"  {name:18} x{len(steps):3}  {time}  {size / max(run + wait, 1e-9) / 1e9:6.1f} GB/s  {shown}")


def main() -> None:
    """Parse, load, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--isa", default="avx512vnni")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--chunk", default="512")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=7)
    a = parser.parse_args()
    executor, program, times = load_timed(a.engine, a.isa, a.threads)
    for size in map(int, filter(None, a.batch.split(","))):
        batch = ScheduledBatch(tuple(decodes(executor.groups, size, a.context)))
        show(f"decode x{size} at {a.context}", executor, program, times, batch, a.runs)
    for length in map(int, filter(None, a.chunk.split(","))):
        ids = tuple(np.random.default_rng(0).integers(10, 100, length).tolist())
        batch = ScheduledBatch((ScheduledSequence(0, ids, 0, plain_tables(executor.groups, length), num_logits=1),))
        show(f"prefill {length}", executor, program, times, batch, 3)


if __name__ == "__main__":
    main()
