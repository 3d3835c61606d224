"""Checks that the kernels are right on this machine: the engine runs its canary prompts, whose answers are known.

Hashes show that the files are unchanged; the canaries show that this CPU or GPU computes the right results with them.
Each canary runs twice: whole, as prefill, and token by token, as decode.
"""

from __future__ import annotations

import numpy as np

from .batch.scheduled import ScheduledBatch
from .errors import UsageError, WrongAnswersError
from .executor.base import Executor
from .format.batch import BatchArray
from .format.canaries import Canary
from .format.load import Engine
from .kv.config import GroupConfig
from .kv.policy import WithinStep
from .loop.engine_loop import EngineLoop


def verify_answers(engine: Engine, executor: Executor, required: bool = True) -> float | None:
    """The largest deviation that was found, relative to the tolerance; WrongAnswersError if it is above 1.

    required: whether an engine without canaries is refused; if not, the result for it is None.
    """
    canaries = engine.canaries()
    if canaries is None:
        if required:
            raise UsageError(
                "the engine has no canary prompts to verify its answers with",
                "compile the model again with this version of icc, or leave --verify-answers out",
            )
        return None
    worst = 0.0
    runners: list[tuple[Executor, str]] = [(executor, "prompts")]
    if not any(isinstance(group.policy, WithinStep) for group in executor.groups):
        runners.append((_OneToken(executor), "single tokens"))
    for runner, how in runners:
        loop = EngineLoop(engine.manifest, runner, None)
        for number, canary in enumerate(canaries.prompts):
            found = deviation(_rows(loop, canary), canary)
            if not found <= canaries.allowed:  # NaN fails this comparison, too
                raise WrongAnswersError(number, how, found, canaries.allowed)
            worst = max(worst, found / canaries.allowed)
    return worst


def deviation(rows: np.ndarray, canary: Canary) -> float:
    """How far rows [T, vocab] are from a canary's answers; NaN if a row has NaNs."""
    wanted = np.array(canary.logits, np.float64)
    found = np.stack([rows[at][ids] for at, ids in zip(canary.positions, canary.ids, strict=True)]).astype(np.float64)
    spread = np.sqrt(np.mean((wanted - wanted.mean(axis=1, keepdims=True)) ** 2, axis=1))
    off = np.sqrt(np.mean((found - wanted) ** 2, axis=1)) / np.maximum(spread, 1e-6)
    return float(np.median(off)) if np.isfinite(off).all() else float("nan")


def _rows(loop: EngineLoop, canary: Canary) -> np.ndarray:
    """The engine's output for every token of a canary: float32 [T, vocab]."""
    scores = loop.requests.add_rows(canary.tokens)
    chunks: list[np.ndarray] = []
    try:
        while sum(map(len, chunks)) < len(canary.tokens):
            loop.step()
            chunks += scores.take()
    finally:
        loop.end(scores)
    return np.concatenate(chunks)


class _OneToken:
    """An executor that limits each step to one token."""

    max_step_tokens, max_batch_size, max_logit_rows = 1, 1, 1

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    @property
    def groups(self) -> tuple[GroupConfig, ...]:
        return self._executor.groups

    @property
    def inputs(self) -> tuple[BatchArray, ...]:
        return self._executor.inputs

    @property
    def vocab_size(self) -> int:
        return self._executor.vocab_size

    def step(self, batch: ScheduledBatch) -> np.ndarray:
        return self._executor.step(batch)

    def close(self) -> None:
        """Does nothing: the executor belongs to the caller."""
