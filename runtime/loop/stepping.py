"""Steps: a batch runs and its logits are sampled, on the device where that can be, else here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..batch.scheduled import ScheduledBatch, ScheduledSequence
from ..executor.base import Executor, screening
from ..executor.sampling import Sampled, SamplingRow, sampling
from ..requests.generation import Generation
from ..speculate.typical import TypicalAcceptance
from ..speculate.verify import Walk, follow
from .sampler import Sample, TokenLogprob


@dataclass(frozen=True)
class Flight:
    """A step under way. ticket: the device's, None where nothing runs before `results`. rows: how the device samples
    each logit row, None for a row that the host looks at. typical: how guesses are accepted, None if losslessly."""

    batch: ScheduledBatch
    rows: Sequence[SamplingRow | None] = ()
    ticket: Any = None
    typical: TypicalAcceptance | None = None

    @property
    def on_device(self) -> bool:
        """Whether the device knows all tokens of this step by itself, so that a next one can be started already."""
        return self.ticket is not None and None not in self.rows


@dataclass(frozen=True)
class Result:
    """What a step gave to one sequence: logits `[rows, vocab]` of a scoring request, whose tokens from number `row`
    on they belong to; or new tokens, the last of them from logit row `row` of the step."""

    request_id: int
    logits: np.ndarray | None = None
    walk: Walk | None = None
    row: int = -1


class Stepper:
    """Starts and ends the steps of one executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._screening = screening(executor)
        self._device = sampling(executor)
        self._tickets: list[Any] = []  # of the steps that the device has and nobody has collected

    def start(
        self,
        batch: ScheduledBatch,
        generations: Mapping[int, Generation],
        typical: TypicalAcceptance | None = None,
    ) -> Flight:
        """Start a step. `generations` are the requests that sample; those not in it are scored."""
        if self._device is None:
            return Flight(batch, typical=typical)
        rows = [row for sequence in batch.sequences for row in _rows(sequence, generations, typical)]
        self._tickets.append(self._device.submit(batch, rows))
        return Flight(batch, rows, self._tickets[-1], typical)

    def drop(self) -> None:
        """Forget all steps under way, after a failure: the device must have none when it is given the next."""
        while self._tickets and self._device is not None:
            with suppress(Exception):
                self._device.collect(self._tickets.pop(0))

    def works(self) -> bool:
        """Whether the device can run anything at all: one token, into a cache that holds nothing."""
        try:
            self._executor.step(
                ScheduledBatch((ScheduledSequence(-1, (0,), 0, ((0,),) * len(self._executor.groups), 1),))
            )
        except Exception:
            return False
        return True

    def results(self, flight: Flight, generations: Mapping[int, Generation]) -> Iterator[Result]:
        """Wait for a step: a result for every sequence that wanted logits and has not ended since."""
        sampled = None
        if flight.ticket is None:
            if self._screening is not None and _all_greedy(flight.batch, generations):
                logits = self._screening.step_greedy(flight.batch)
            else:
                logits = self._executor.step(flight.batch)
        else:
            assert self._device is not None
            self._tickets.remove(flight.ticket)
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
                    take = partial(_take, sampled, generation, self._executor.vocab_size)
                    yield _walk(sequence, generation, start, take)
                continue
            assert logits is not None
            if generation is None:
                yield Result(sequence.request_id, logits[start:end], row=sequence.start)
            elif flight.typical is not None and sequence.draft is not None and generation.sampler.is_plain:
                yield _walk_typically(sequence, generation, logits[start:end], start, flight.typical)
            else:
                yield _walk(sequence, generation, start, lambda row, g=generation: _sample(g, logits[row]))


def _walk(
    sequence: ScheduledSequence, generation: Generation, start: int, sample: Callable[[int], Sample | None]
) -> Result:
    """The new tokens of a request whose logit rows begin at `start`."""
    walk = follow(sequence.draft, lambda row: sample(start + row), generation.end_ids)
    return Result(sequence.request_id, walk=walk, row=start + walk.row)


def _walk_typically(
    sequence: ScheduledSequence, generation: Generation, logits: np.ndarray, start: int, typical: TypicalAcceptance
) -> Result:
    """The same where guesses need only be probable enough. logits: `[rows, vocab]`, the request's own."""
    assert sequence.draft is not None
    walk = typical.follow(sequence.draft, logits, generation.sampler, generation.end_ids)
    return Result(sequence.request_id, walk=walk, row=start + walk.row)


def _all_greedy(batch: ScheduledBatch, generations: Mapping[int, Generation]) -> bool:
    """Whether of every logit row only the largest logit is wanted."""
    for sequence in batch.sequences:
        generation = generations.get(sequence.request_id)
        if sequence.num_logits and (generation is None or not generation.sampler.is_argmax):
            return False
    return True


def _rows(
    sequence: ScheduledSequence, generations: Mapping[int, Generation], typical: TypicalAcceptance | None
) -> list[SamplingRow | None]:
    generation = generations.get(sequence.request_id)
    depths = [0, *(sequence.draft.depths() if sequence.draft else ())]
    if generation is None or sequence.num_logits != len(depths):
        return [None] * sequence.num_logits
    if typical is not None and generation.sampler.is_plain:  # the host looks at probabilities, at every step
        return [None] * sequence.num_logits
    ahead = int(sequence.token_ids[0] < 0)
    return [generation.sampler.device_row(ahead + depth) for depth in depths]


def _sample(generation: Generation, logits: np.ndarray) -> Sample | None:
    """The host's sample of one row; None too if it fails or is no token, which must not end the other requests."""
    try:
        sample = generation.sampler.sample(logits)
    except Exception as error:
        generation.fault = error
        return None
    return sample if sample is None or 0 <= sample.token_id < len(logits) else None


def _take(sampled: Sampled, generation: Generation, vocab_size: int, row: int) -> Sample | None:
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
