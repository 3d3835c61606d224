"""`--tune`: chooses the fastest blocks for products by time, on this machine, for this program and these weights.

Candidates are whole libraries that differ in the number of streams and the prefetch distance of the blocks for each row
count. They are timed in turns, and each row count gets the fastest block. Neither parameter changes any result.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from ...runtime.executor.cpu.device import CpuDevice
from ...runtime.executor.player import Player
from ...runtime.format.manifest import Limits
from ..backends.base import Built
from ..backends.cpu.build import build_libraries
from ..backends.cpu.isa import ALL, Block, Isa
from ..program.program import Program
from ..targets import Target
from .staged import CONTEXT, open_staged, verify_step

VARIANTS = tuple((tiles, ahead) for tiles in (4, 2, 1) for ahead in (256, 2048))
KINDS = ("dense_blocks", "quant_blocks", "nibble_blocks")  # of an Isa
MOST_ACCUMULATORS = 32  # most accumulators of a candidate
ROUNDS = 7
WORTH = 0.97  # share of the default's time: a smaller gain is noise

Times = dict[int, list[float]]  # rows -> least seconds of a step for each candidate, the default first


def tune_here(
    stage: Path, target: Target, built: Built, limits: Limits, progress: Callable[[str, int, int], None]
) -> tuple[Built, list[str]]:
    """Build the library of an engine again with the fastest blocks on this machine. Also returns the names of the
    blocks that are not the default.

    `stage` holds the packed weights. Takes a minute or two: every candidate is compiled and run.
    """
    program = built.program
    isa = next(isa for isa in ALL if isa.name == built.libraries[0].isa)
    candidates = [isa, *(variant(isa, tiles, ahead) for tiles, ahead in VARIANTS)]
    rows = sorted({block.rows for block in (*isa.dense_blocks, *isa.quant_blocks) if block.rows <= _most_rows(limits)})
    with tempfile.TemporaryDirectory(dir=stage) as folder, ExitStack() as stack:
        executors = []
        for number, candidate in enumerate(candidates):
            executors.append(_executor(Path(folder) / str(number), stage, target, program, limits, candidate, stack))
            progress("build", number + 1, len(candidates))
        times = {}
        for number, count in enumerate(rows):
            times[count] = _least(executors, count, limits)
            progress("time", number + 1, len(rows))
    chosen = choose(isa, candidates, times)
    [library] = build_libraries(program, stage / "kernels", [chosen])
    pairs = [pair for kind in KINDS for pair in zip(getattr(isa, kind), getattr(chosen, kind), strict=True)]
    return replace(built, libraries=(library,)), sorted({block.name for old, block in pairs if block != old})


def variant(isa: Isa, tiles: int, ahead: int) -> Isa:
    """The ISA level with other blocks: `tiles` streams, unless that needs too many accumulators, and prefetch distance
    `ahead`."""

    def other(block: Block) -> Block:
        return Block(block.rows, tiles if block.rows * tiles <= MOST_ACCUMULATORS else block.tiles, ahead)

    return replace(isa, **{kind: tuple(map(other, getattr(isa, kind))) for kind in KINDS})


def choose(isa: Isa, candidates: list[Isa], times: Times) -> Isa:
    """The ISA level in which each block is that of the fastest candidate at its row count, if the gain is worth it."""

    def pick(kind: str) -> tuple[Block, ...]:
        chosen = []
        for index, block in enumerate(getattr(isa, kind)):
            found = times.get(block.rows, [0.0])
            best = min(range(len(found)), key=found.__getitem__)
            chosen.append(getattr(candidates[best], kind)[index] if found[best] < WORTH * found[0] else block)
        return tuple(chosen)

    return replace(isa, **{kind: pick(kind) for kind in KINDS})


def _most_rows(limits: Limits) -> int:
    return min(limits.max_step_tokens, limits.max_batch_size, limits.max_seq_len)


def _executor(
    folder: Path, stage: Path, target: Target, program: Program, limits: Limits, isa: Isa, stack: ExitStack
) -> Player:
    """A player of the candidate's kernels on the stage's weights, with no more KV cache than the timed steps need."""
    built = Built(program, tuple(build_libraries(program, folder / "kernels", [isa])))
    longest = min(limits.max_seq_len, CONTEXT + _most_rows(limits))
    engine = open_staged(stage, target, built, msgspec.structs.replace(limits, max_seq_len=longest), kernels=folder)
    stack.callback(engine.close)
    executor = Player(CpuDevice(engine))
    stack.callback(executor.close)
    return executor


def _least(executors: list[Player], rows: int, limits: Limits) -> list[float]:
    """The least time in seconds of a step of `rows` tokens, for each executor; they take turns."""
    batches = [verify_step(executor, rows, limits.max_seq_len) for executor in executors]
    times = [float("inf")] * len(executors)
    for _ in range(ROUNDS):
        for index, (executor, batch) in enumerate(zip(executors, batches, strict=True)):
            begin = time.perf_counter()
            executor.step(batch)
            times[index] = min(times[index], time.perf_counter() - begin)
    return times
