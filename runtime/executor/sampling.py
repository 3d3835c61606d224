"""Inputs and results of executors that sample on the device: only token ids come back, and steps can overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from ..batch.scheduled import ScheduledBatch
from .base import Executor, greedy

if TYPE_CHECKING:
    import numpy as np
else:
    from ..late import np


class SamplingRow(NamedTuple):
    """How one logit row is sampled. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    The random choice depends only on seed (64 bits) and counter (the token's index in its request).
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    counter: int


GREEDY = SamplingRow(0.0, 0, 1.0, 0.0, 0, 0)


def fill_rows(arrays: Mapping[str, np.ndarray], first: int, rows: Sequence[SamplingRow | None]) -> None:
    """Write rows to the arrays of `SAMPLING`, from index `first` on; rows that the host samples (None) are written as
    greedy."""
    if not rows:
        return
    part = slice(first, first + len(rows))
    columns = dict(zip(SamplingRow._fields, zip(*[row or GREEDY for row in rows], strict=True), strict=True))
    seeds = np.array(columns.pop("seed"), dtype=np.uint64)
    arrays["seed"][part] = seeds.view(np.int32).reshape(-1, 2)
    for name, column in columns.items():
        arrays[name][part] = column


class Sampled(msgspec.Struct, frozen=True):
    """The tokens that one step sampled.

    token_ids: int32 `[L]`, -1 if the row's logits are not numbers. logprobs: float32 `[L]`, of these tokens. top_ids
    and top_logprobs: `[L, TOP_LOGPROBS]`, the likeliest tokens of each row, best first, padded with -1. logits: float32
    `[L, vocab]` if the host samples some row, else None.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    logits: np.ndarray | None = None


@runtime_checkable
class SamplingExecutor(Protocol):
    """An executor that may sample on the device. Two steps may be in flight: the second may use tokens that the first
    samples.

    samples: whether it can sample for its engine.
    """

    @property
    def samples(self) -> bool:
        """Whether it can sample for its engine."""
        ...

    def submit(self, batch: ScheduledBatch, rows: Sequence[SamplingRow | None]) -> Any:
        """Start a step that samples one token per logit row, except for rows that the host samples (None); returns at
        once.

        A negative token id is a `pending_token` of the previously submitted step.
        """
        ...

    def collect(self, ticket: Any) -> Sampled:
        """Wait for the oldest submitted step. The arrays are valid until two more steps are submitted."""
        ...


def sampling(executor: Executor) -> SamplingExecutor | None:
    """The executor, if it samples; else None."""
    return executor if isinstance(executor, SamplingExecutor) and executor.samples else None


def greedy_tokens(executor: Executor, batch: ScheduledBatch) -> list[int]:
    """Run one step; returns the likeliest token of each logit row, 0 if the device finds no finite largest logit."""
    if (device := sampling(executor)) is not None:  # no logits are copied
        ticket = device.submit(batch, [GREEDY] * batch.num_logit_rows)
        return device.collect(ticket).token_ids.clip(0).tolist()
    if (choosing := greedy(executor)) is not None:
        return [max(token, 0) for token in choosing.step_greedy(batch)]
    return executor.step(batch).argmax(axis=1).tolist()


def likeliest_tokens(executor: Executor, batch: ScheduledBatch) -> list[tuple[int, ...]]:
    """Run one step; returns the likeliest token of each logit row as in `greedy_tokens`, and after it the second
    likeliest, unless the executor only finds the first."""
    if (device := sampling(executor)) is not None:
        sampled = device.collect(device.submit(batch, [GREEDY] * batch.num_logit_rows))
        firsts = sampled.token_ids.clip(0).tolist()
        return [_pair(first, best) for first, best in zip(firsts, sampled.top_ids[:, :2].tolist(), strict=True)]
    if greedy(executor) is not None:
        return [(token,) for token in greedy_tokens(executor, batch)]
    logits = executor.step(batch).copy()
    firsts = logits.argmax(axis=1)
    logits[np.arange(len(logits)), firsts] = -np.inf
    return list(zip(firsts.tolist(), logits.argmax(axis=1).tolist(), strict=True))


def _pair(first: int, best: Sequence[int]) -> tuple[int, ...]:
    second = next((token for token in best if token not in (first, -1)), None)
    return (first,) if second is None else (first, second)
