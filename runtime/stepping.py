"""Steps: a batch runs and its logits are sampled, on the device where that can be, else here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .executor.base import Executor
from .executor.sampling import Sampled, SamplingExecutor, SamplingRow
from .generation import Generation
from .sampler import Sample, TokenLogprob
from .scheduler.batch import ScheduledBatch, ScheduledSequence


@dataclass(frozen=True)
class Flight:
    """A step under way. ticket: the device's, None where nothing runs before `results`. rows: how the device samples
    each logit row, None for a row that the host looks at."""

    batch: ScheduledBatch
    rows: Sequence[SamplingRow | None] = ()
    ticket: Any = None

    @property
    def on_device(self) -> bool:
        """Whether the device knows all tokens of this step by itself, so that a next one can be started already."""
        return self.ticket is not None and None not in self.rows


@dataclass(frozen=True)
class Result:
    """What a step gave to one sequence: logits `[rows, vocab]` of a scoring request, or a sample, None if the logits
    are not numbers."""

    request_id: int
    logits: np.ndarray | None
    sample: Sample | None


class Stepper:
    """Starts and ends the steps of one executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._device = executor if isinstance(executor, SamplingExecutor) else None

    def start(self, batch: ScheduledBatch, generations: Mapping[int, Generation]) -> Flight:
        """Start a step. `generations` are the requests that sample; those not in it are scored."""
        if self._device is None:
            return Flight(batch)
        rows = [row for sequence in batch.sequences for row in _rows(sequence, generations)]
        return Flight(batch, rows, self._device.submit(batch, rows))

    def results(self, flight: Flight, generations: Mapping[int, Generation]) -> Iterator[Result]:
        """Wait for a step: a result for every sequence that wanted logits and has not ended since."""
        sampled = None
        if flight.ticket is None:
            logits = self._executor.step(flight.batch)
        else:
            assert self._device is not None
            sampled = self._device.collect(flight.ticket)
            logits = sampled.logits
        end = 0
        for sequence in flight.batch.sequences:
            start, end = end, end + sequence.num_logits
            generation = generations.get(sequence.request_id)
            if start == end:
                continue
            if sampled is not None and flight.rows[start] is not None:
                if generation is not None:  # else it ended while this step ran ahead
                    yield Result(
                        sequence.request_id, None, _take(sampled, start, generation, self._executor.vocab_size)
                    )
                continue
            assert logits is not None
            if generation is None:
                yield Result(sequence.request_id, logits[start:end], None)
            else:
                yield Result(sequence.request_id, None, _sample(generation, logits[end - 1]))


def _rows(sequence: ScheduledSequence, generations: Mapping[int, Generation]) -> list[SamplingRow | None]:
    generation = generations.get(sequence.request_id)
    if generation is None or sequence.num_logits != 1:
        return [None] * sequence.num_logits
    return [generation.sampler.device_row(ahead=sequence.token_ids[0] < 0)]


def _sample(generation: Generation, logits: np.ndarray) -> Sample | None:
    """The host's sample of one row; None too if it fails, which must not end the other requests."""
    try:
        return generation.sampler.sample(logits)
    except Exception:
        return None


def _take(sampled: Sampled, row: int, generation: Generation, vocab_size: int) -> Sample | None:
    """The device's sample of one row, counted by the request's sampler; None if it is no token."""
    generation.sampler.count_device_sample()
    token, top = int(sampled.token_ids[row]), generation.params.logprobs
    if not 0 <= token < vocab_size:
        return None
    if top is None:
        return Sample(token)
    pairs = zip(sampled.top_ids[row, :top].tolist(), sampled.top_logprobs[row, :top].tolist(), strict=True)
    likeliest = tuple((index, value) for index, value in pairs if index >= 0)
    return Sample(token, TokenLogprob(token, float(sampled.logprobs[row]), likeliest))
