"""The time of an all-reduce between two processes: the kernel library of a program with nothing but all-reduces."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from icc.compiler.backends.cpu.build import build_libraries
from icc.compiler.backends.cpu.isa import host_isas
from icc.compiler.program.program import Program
from icc.compiler.program.steps.collective import AllReduce
from icc.runtime.executor.cpu.device import arrays_of
from icc.runtime.executor.cpu.library import IccBatch, KernelLibrary
from icc.runtime.executor.cpu.rank_memory import RankMemory
from icc.runtime.format.batch import BatchLimits
from icc.runtime.format.kv import KVGroup, KVLayout
from icc.runtime.format.operands import BufferOperand
from icc.runtime.format.program import Buffer

WIDTH = 2048  # elements of a row


def sum_seconds(nbytes: int, rounds: int) -> float:
    """Median seconds of one all-reduce of `nbytes` bytes of float32, between two processes, each on its own core."""
    tokens = max(nbytes // (4 * WIDTH), 1)
    sums = 64 if nbytes < 1 << 20 else 2
    program = _program(sums)
    with tempfile.TemporaryDirectory() as folder:
        [library] = build_libraries(program, Path(folder) / "kernels", host_isas()[:1])
        image = (Path(folder) / library.path).read_bytes()
    memory = RankMemory(2, arrays_of(program), BatchLimits(tokens, 1, 1, 1, 1))
    cores = sorted(os.sched_getaffinity(0))
    child = os.fork()
    own = cores[0] if child or len(cores) < 2 else cores[1]
    os.sched_setaffinity(0, {own})
    kernels = KernelLibrary(image, "sums")
    arena = np.ones(program.arena_bytes_per_token * tokens // 4 + 16, np.float32)
    handle = kernels.create(1, [], arena.ctypes.data, arena.ctypes.data, [1])
    kernels.join_ranks(handle, 0 if child else 1, 2, 1, memory)
    zeros = np.zeros(max(tokens, 64), np.int32)
    names = ("token_ids", "positions", "slot_mapping", "seq_starts", "context_lens", "block_tables", "logit_rows")
    batch = (IccBatch * 1)(IccBatch(num_tokens=tokens, num_seqs=1, **{name: zeros.ctypes.data for name in names}))
    if not child:
        kernels.follow(handle, batch)
        os._exit(0)
    times: list[float] = []
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        kernels.step(handle, batch)
        times.append((time.perf_counter() - begin) / sums)
    kernels.end_ranks(handle)
    os.waitpid(child, 0)
    os.sched_setaffinity(0, set(cores))
    return statistics.median(times[2:])


def _program(sums: int) -> Program:
    """A program of `sums` all-reduces, from one buffer to the other and back."""
    ends = [BufferOperand(name, "f32", WIDTH, 0) for name in ("a", "b")]
    step = AllReduce(kernel="sum", x=ends[0], y=ends[1], n=WIDTH)
    back = AllReduce(kernel="sum", x=ends[1], y=ends[0], n=WIDTH)
    buffers = [Buffer("a", "f32", [WIDTH], "tokens", 0), Buffer("b", "f32", [WIDTH], "tokens", 4 * WIDTH)]
    return Program(
        kernels={"sum": "all_reduce"}, steps=(step, back) * (sums // 2), buffers=buffers, weights={},
        kv=KVLayout((KVGroup(16, "f32", {}),)), arena_bytes_per_token=8 * WIDTH, vocab_size=1,
    )  # fmt: skip
