"""Steps: runs a batch and samples its logits, on the device if possible, else here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import TYPE_CHECKING, Any

import msgspec

from ..batch.scheduled import Draft, ScheduledBatch, ScheduledSequence, StepOutcome, Verdict
from ..executor.base import Executor, greedy, merging, pipelined
from ..executor.sampling import Sampled, SamplingRow, sampling
from ..requests.generation import Generation
from ..requests.request import Request
from ..requests.sampler import AcceptedTokens, SampledToken, TokenLogprob
from ..requests.scores import ScoreRequest
from ..requests.search import SearchRequest
from ..speculate.verify import follow

if TYPE_CHECKING:
    import numpy as np

    from ..speculate.typical import TypicalAcceptance


class Flight(msgspec.Struct, frozen=True):
    """A step in flight. ticket: the device's, None if nothing runs before `finish`. rows: how the device samples each
    logit row, None for a row that the host samples. typical: how guesses are accepted; None: losslessly. with_choices:
    whether the model's tokens after all guesses are wanted."""

    batch: ScheduledBatch
    rows: Sequence[SamplingRow | None] = ()
    ticket: Any = None
    typical: TypicalAcceptance | None = None
    with_choices: bool = False

    @property
    def on_device(self) -> bool:
        """Whether the device samples all tokens of this step, so that the next step can be started already."""
        return self.ticket is not None and None not in self.rows


class StepResult(msgspec.Struct, frozen=True):
    """A step that has run. outcomes: the results for the scheduler. rows: by request id, the logit row of the newest
    token of each request that continues. choices: if wanted, for each request with a draft, the token of each logit
    row, -1 if the row's largest logit is not finite."""

    batch: ScheduledBatch
    outcomes: list[StepOutcome]
    rows: dict[int, int]
    choices: dict[int, list[int]]


class Stepper:
    """Starts and ends the steps of one executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._vocab_size = executor, executor.vocab_size
        self._greedy, self._merging = greedy(executor), merging(executor)
        self._device, self._pipeline = sampling(executor), pipelined(executor)
        self.flights = 1 if self._pipeline is None else self._pipeline.flights  # steps of different requests at once
        self._tickets: list[Any] = []  # of steps that were started and not collected

    def start(
        self,
        batch: ScheduledBatch,
        requests: Mapping[int, Request],
        typical: TypicalAcceptance | None = None,
        with_choices: bool = False,
    ) -> Flight:
        """Start a step; requests: those that have not ended, by id. typical: which guesses are accepted besides sampled
        ones; None: no others."""
        if self._pipeline is not None:
            self._tickets.append(self._pipeline.begin(batch, self._greedy is not None and _all_greedy(batch, requests)))
            return Flight(batch, (), self._tickets[-1], typical, with_choices)
        if self._device is None:
            return Flight(batch, typical=typical, with_choices=with_choices)
        rows = [row for sequence in batch.sequences for row in _rows(sequence, requests, typical)]
        self._tickets.append(self._device.submit(batch, rows))
        return Flight(batch, rows, self._tickets[-1], typical, with_choices)

    def drop(self) -> None:
        """Drop all steps in flight after a failure, so that the device has none when the next one starts."""
        while self._tickets:
            ticket, *self._tickets = self._tickets
            with suppress(Exception):
                if self._pipeline is not None:
                    self._pipeline.end(ticket)
                elif self._device is not None:
                    self._device.collect(ticket)

    def works(self) -> bool:
        """Whether the device can run at all: tries one token in an unused cache."""
        try:
            self._executor.step(
                ScheduledBatch((ScheduledSequence(-1, (0,), 0, ((0,),) * len(self._executor.groups), 1),))
            )
        except Exception:
            return False
        return True

    def finish(self, flight: Flight, requests: Mapping[int, Request]) -> StepResult:
        """Wait for a step, and pass its results to every request that wanted logits and has not ended since: logits
        `[rows, vocab]` to score, or new tokens."""
        tokens, sampled, logits = self._wait(flight, requests)
        outcomes: list[StepOutcome] = []
        rows, choices = dict[int, int](), dict[int, list[int]]()
        end = 0
        for sequence in flight.batch.sequences:
            start, end = end, end + sequence.num_logits
            request = requests.get(sequence.request_id)
            if start == end or request is None:  # within a prompt, or it ended after this step was started early
                continue
            if isinstance(request, ScoreRequest):
                assert logits is not None
                outcomes.append(request.push(logits[start:end], sequence.start))
                continue
            if isinstance(request, SearchRequest):
                assert logits is not None
                outcomes.append(request.push(sequence.beam, logits[start]))
                continue
            assert isinstance(request, Generation)
            if tokens and (not flight.rows or flight.rows[start] is not None):
                if sequence.draft is None:
                    outcomes.append(request.take_one(self._device_sample(request, sampled, tokens, start)))
                    if outcomes[-1].verdict is Verdict.CONTINUE:
                        rows[request.request_id] = start
                    continue
                walk = self._device_walk(sequence.draft, request, sampled, tokens, start)
            else:
                assert logits is not None
                walk = _host_walk(sequence, request, logits[start:end], flight.typical)
            if flight.with_choices and sequence.draft is not None:
                choices[request.request_id] = tokens[start:end] if tokens else _likeliest(logits, start, end)
            outcomes.append(request.take(walk))
            if outcomes[-1].verdict is Verdict.CONTINUE:
                rows[request.request_id] = start + walk.row
        return StepResult(flight.batch, outcomes, rows, choices)

    def _wait(
        self, flight: Flight, requests: Mapping[int, Request]
    ) -> tuple[list[int], Sampled | None, np.ndarray | None]:
        """The tokens that the device chose (empty: none), its other results (None: none), and the logits (None: the
        host wants none), float32 [rows, vocab]."""
        if flight.ticket is None:
            if self._greedy is not None and _all_greedy(flight.batch, requests):
                return self._greedy.step_greedy(flight.batch), None, None
            if self._merging is not None and flight.typical is None:
                wanted = _wanted(flight.batch, requests)
                if 0 < wanted <= min(self._merging.most_wanted, self._vocab_size - 1):
                    return [], None, self._merging.step_largest(flight.batch, wanted)
            return [], None, self._executor.step(flight.batch)
        self._tickets.remove(flight.ticket)
        if self._pipeline is not None:
            tokens, logits = self._pipeline.end(flight.ticket)
            return tokens, None, logits
        assert self._device is not None
        sampled = self._device.collect(flight.ticket)
        return sampled.token_ids.tolist(), sampled, sampled.logits

    def _device_walk(
        self, draft: Draft, generation: Generation, sampled: Sampled | None, tokens: list[int], start: int
    ) -> AcceptedTokens:
        """The new tokens of a request whose guesses are verified by the device's tokens; its rows begin at `start`."""
        return follow(
            draft, lambda row: self._device_sample(generation, sampled, tokens, start + row), generation.end_ids
        )

    def _device_sample(
        self, generation: Generation, sampled: Sampled | None, tokens: list[int], row: int
    ) -> SampledToken | None:
        """The device's sample of one row, counted by the request's sampler; None if it is no token. tokens: of all
        rows."""
        generation.sampler.count_device_sample()
        token = tokens[row]
        if not 0 <= token < self._vocab_size:
            return None
        if generation.params.logprobs is None:
            return SampledToken(token)
        assert sampled is not None
        return SampledToken(token, _logprob(sampled, generation, row))


def _host_walk(
    sequence: ScheduledSequence, generation: Generation, logits: np.ndarray, typical: TypicalAcceptance | None
) -> AcceptedTokens:
    """The new tokens of a request that the host samples from its own logits, `[rows, vocab]`."""
    if typical is not None and sequence.draft is not None and generation.sampler.is_plain:
        return typical.follow(sequence.draft, logits, generation.sampler, generation.end_ids)
    return follow(sequence.draft, lambda row: _sample(generation, logits[row]), generation.end_ids)


def _likeliest(logits: np.ndarray | None, start: int, end: int) -> list[int]:
    """The tokens of the largest logits of rows start .. end - 1 of `logits` [rows, vocab], -1 if the largest is not
    finite."""
    assert logits is not None
    best = logits[start:end].argmax(axis=1)
    return [int(token) if isfinite(row[token]) else -1 for token, row in zip(best, logits[start:end], strict=True)]


def _all_greedy(batch: ScheduledBatch, requests: Mapping[int, Request]) -> bool:
    """Whether only the largest logit of every logit row is wanted."""
    for sequence in batch.sequences:
        request = requests.get(sequence.request_id)
        if sequence.num_logits and not (isinstance(request, Generation) and request.sampler.is_argmax):
            return False
    return True


def _wanted(batch: ScheduledBatch, requests: Mapping[int, Request]) -> int:
    """How many of the largest logits of every logit row are wanted; 0 if all logits of some row are wanted."""
    found = [0]
    for sequence in batch.sequences:
        request = requests.get(sequence.request_id)
        if sequence.num_logits and request is not None:
            found.append(request.sampler.wanted if isinstance(request, Generation) else 0)
    return 0 if 0 in found[1:] else max(found)


def _rows(
    sequence: ScheduledSequence, requests: Mapping[int, Request], typical: TypicalAcceptance | None
) -> list[SamplingRow | None]:
    generation = requests.get(sequence.request_id)
    if not sequence.num_logits:
        return []
    ahead = int(sequence.token_ids[0] < 0)
    if sequence.draft is None and sequence.num_logits == 1 and isinstance(generation, Generation):
        if typical is None or not generation.sampler.is_plain:
            return [generation.sampler.device_row(ahead)]
    depths = [0, *sequence.draft.depths()] if sequence.draft else [0]
    if not isinstance(generation, Generation) or sequence.num_logits != len(depths):
        return [None] * sequence.num_logits
    if typical is not None and generation.sampler.is_plain:  # the host needs the probabilities of every step
        return [None] * sequence.num_logits
    return [generation.sampler.device_row(ahead + depth) for depth in depths]


def _sample(generation: Generation, logits: np.ndarray) -> SampledToken | None:
    """The host's sample of one row; None if sampling fails or gives no token, which must not end other requests."""
    try:
        sample = generation.sampler.sample(logits)
    except Exception as error:
        generation.fault = error
        return None
    return sample if sample is None or 0 <= sample.token_id < len(logits) else None


def _logprob(sampled: Sampled, generation: Generation, row: int) -> TokenLogprob:
    """The log-probabilities that the device reported for the token of a row."""
    top = generation.params.logprobs
    pairs = zip(sampled.top_ids[row, :top].tolist(), sampled.top_logprobs[row, :top].tolist(), strict=True)
    likeliest = tuple((index, value) for index, value in pairs if index >= 0)
    return TokenLogprob(int(sampled.token_ids[row]), float(sampled.logprobs[row]), likeliest)
