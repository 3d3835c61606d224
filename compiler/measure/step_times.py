"""Measures the time of steps by their number of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...runtime.executor.cpu.device import CpuDevice
from ...runtime.executor.player import Player
from ...runtime.format.manifest import Limits
from ...runtime.format.program import ASKED_ROWS
from ...runtime.speculate.medusa import SECTION
from ..backends.base import Built
from ..speculate.cost import HOST
from ..speculate.tree import Cost
from ..targets import Target
from .staged import open_staged, verify_step

ROUNDS, BUDGET = 40, 0.25  # most runs, and most seconds, in which a step is timed


def measured_cost(stage: Path, target: Target, built: Built, limits: Limits) -> Cost:
    """The cost in seconds with the kernels and weights in `stage`, including draft heads: measured for 1, 2, 4, ...
    tokens, and interpolated linearly."""
    engine = open_staged(stage, target, built, limits)
    executor = Player(CpuDevice(engine))
    try:
        top = min(executor.max_step_tokens, executor.max_logit_rows, 128)
        sizes = sorted({min(2**power, top) for power in range(top.bit_length() + 1)})
        steps = [_time_step(executor, size, limits) for size in sizes]
        few = [size for size in sizes if size <= executor.max_batch_size]
        asked = [{ASKED_ROWS: np.arange(size, dtype=np.int32)} for size in few]
        drafts = [_best(lambda rows=rows: executor.run(SECTION, rows)) for rows in asked]
    finally:
        executor.close()
        engine.close()
    steps, drafts = _rising(steps), _rising(drafts)

    def cost(batch: int, guesses: int) -> float:
        tokens = batch * (1 + guesses)
        step = float(np.interp(tokens, sizes, steps)) * max(1.0, tokens / top)
        return HOST + step + (float(np.interp(batch, few, drafts)) if guesses else 0.0)

    return cost


def _rising(times: list[float]) -> list[float]:
    """The times made monotonic: a smaller step takes no longer than a larger one, unless something else ran."""
    return np.minimum.accumulate(times[::-1])[::-1].tolist()


def _time_step(executor: Player, tokens: int, limits: Limits) -> float:
    batch = verify_step(executor, tokens, limits.max_seq_len)
    return _best(lambda: executor.step(batch))


def _best(run: Callable[[], object]) -> float:
    """The least time of many runs, in seconds, because other load only adds to it."""
    times: list[float] = []
    while len(times) < 3 or (len(times) < ROUNDS and sum(times) < BUDGET):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)
