"""Beam search: which continuations of a prompt go on, and which of the ended ones are the best.

As transformers 5 has it (`GenerationMixin._beam_search`): of all continuations of all beams by one token the likeliest
are looked at, twice as many as there are beams, or more where more tokens end a text. Those that end, and are among the
first, are kept by their score, which is the sum of their log-probabilities divided by a power of their length; the best
of the others go on. Sums are float32, as there. Other modules refuse requests and copy blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..tokenizer import Detokenizer, StopFinder
from .params import SamplingParams
from .sampler import Sampler, TokenLogprob, largest_of

if TYPE_CHECKING:
    import numpy as np
else:
    from ..late import np


@dataclass(slots=True, eq=False)
class BeamText:
    """The text of a beam as it comes, where strings can end it."""

    detokenizer: Detokenizer
    stop_finder: StopFinder

    def after(self, token_id: int) -> tuple[BeamText, bool]:
        """The text with one more token, and whether a stop string ends it there."""
        words = BeamText(self.detokenizer.copy(), self.stop_finder.copy())
        _, stopped = words.stop_finder.push(words.detokenizer.push(token_id))
        return words, stopped


@dataclass(slots=True, eq=False)
class Beam:
    """A text that may go on. number: of the sequence that computes it. score: the sum of its log-probabilities."""

    number: int
    score: float
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    sampler: Sampler
    words: BeamText | None


class Hypothesis(NamedTuple):
    """A text that has ended, or may: its tokens behind the prompt, its score, and why it ends: "stop" or "length"."""

    score: float
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reason: str


class _Row(NamedTuple):
    """What may follow a beam: float32 log-probabilities `[vocab]`, and the likeliest tokens with theirs."""

    scores: np.ndarray
    tokens: list[int]
    top: tuple[tuple[int, float], ...]


class _Candidate(NamedTuple):
    """A beam with one more token."""

    score: float
    beam: Beam
    token: int
    sampler: Sampler | None  # where its grammar has gone on already
    words: BeamText | None
    ends: str  # why it ends here, "" if it does not


class BeamSearch:
    """`push` for each of `running`, then `advance`, until that gives nothing.

    params: resolved, of `beams`. max_tokens: at most so many. end_ids: tokens that end a text. sampler: what changes
    the logits, before any token; words: of the prompt, where there are stop strings.
    """

    def __init__(
        self,
        params: SamplingParams,
        max_tokens: int,
        end_ids: Collection[int],
        sampler: Sampler,
        words: BeamText | None = None,
    ) -> None:
        self.params, self._max_tokens, self._end_ids = params, max_tokens, end_ids
        self._looked_at = max(2, 1 + len(end_ids)) * params.beams
        self._first = sampler, words
        self.restart()

    def restart(self) -> None:
        """Begin again behind the prompt."""
        sampler, words = self._first
        self.running = [Beam(0, 0.0, (), (), sampler, words)]
        self.finished: list[Hypothesis] = []
        self._rows: dict[int, _Row] = {}
        self._length = 0
        self._hopeful = True  # whether a beam may become better than what has ended

    def lost(self) -> None:
        """The logits of all beams will come again."""
        self._rows.clear()

    def push(self, number: int, logits: np.ndarray) -> bool:
        """The logits behind a beam, float32 `[vocab]`, which are left as they are; False if they are not numbers."""
        beam = next(beam for beam in self.running if beam.number == number)
        scores = beam.sampler.log_probabilities(logits)
        if scores is None:
            return False
        self._rows[number] = self._row(scores)
        return True

    def _row(self, scores: np.ndarray) -> _Row:
        likeliest = largest_of(scores, self._looked_at)
        tokens = [int(token) for token in likeliest if np.isfinite(scores[token])]
        top = tuple((token, float(scores[token])) for token in tokens[: self.params.logprobs or 0])
        return _Row(scores, tokens, top)

    @property
    def ready(self) -> bool:
        """Whether the logits of all beams have come."""
        return len(self._rows) == len(self.running)

    def advance(self) -> list[tuple[int, int]]:
        """Go on by one token: the (number, token) of each beam that is one now; `placed` says what numbers those get.
        None if the search is over. Requires `ready`."""
        assert self.ready
        candidates = self._candidates()
        going_on = [one for one in candidates if not one.ends][: self.params.beams]
        self._finish([one for one in candidates[: self.params.beams] if one.ends])
        self._length += 1
        if going_on:
            self._hopeful = self._hopeful and self._may_improve(going_on[0].score)
        full = len(self.finished) == self.params.beams
        if not going_on:
            self.running = []  # what they are without an end is no text
        if not going_on or not self._hopeful or (full and self.params.early_stopping is True):
            return []
        parents = [one.beam.number for one in going_on]
        self.running = [self._beam(one) for one in going_on]
        self._rows.clear()
        return [(parent, one.token) for parent, one in zip(parents, going_on, strict=True)]

    def placed(self, numbers: Sequence[int]) -> None:
        """The sequences that compute the beams from now on."""
        for beam, number in zip(self.running, numbers, strict=True):
            beam.number = number

    def best(self, count: int) -> list[Hypothesis]:
        """The best texts, best first: those that have ended, and beams as they are where there are too few."""
        found = self.finished[:count]
        running = [
            Hypothesis(self._penalised(beam.score, max(len(beam.tokens), 1)), beam.tokens, beam.logprobs, "length")
            for beam in self.running
        ]
        return found + running[: count - len(found)]

    # -- one token ---------------------------------------------------------------------------------------------------

    def _candidates(self) -> list[_Candidate]:
        """The likeliest continuations, best first."""
        while True:
            found = [
                (float(np.float32(beam.score) + row.scores[token]), order, beam, token)
                for order, beam in enumerate(self.running)
                for row in [self._rows[beam.number]]
                for token in row.tokens
            ]
            found.sort(key=lambda one: (-one[0], one[1]))
            narrowed = False
            candidates: list[_Candidate] = []
            for score, _, beam, token in found[: self._looked_at]:
                sampler = None
                if beam.sampler.follows_grammar:
                    sampler, allowed = beam.sampler.after(token)
                    if allowed is not None:  # the grammar turned it down, and says now what it takes
                        scores = np.where(allowed, self._rows[beam.number].scores, np.float32(-np.inf))
                        self._rows[beam.number] = self._row(scores)
                        narrowed = True
                        break
                words, ends = self._ends(beam, token)
                candidates.append(_Candidate(score, beam, token, sampler, words, ends))
            if not narrowed:
                return candidates

    def _ends(self, beam: Beam, token: int) -> tuple[BeamText | None, str]:
        """The text of a continuation, and why it ends."""
        words, stopped = (None, False) if beam.words is None else beam.words.after(token)
        if stopped or token in self._end_ids:
            return words, "stop"
        return words, "length" if self._length + 1 >= self._max_tokens else ""

    def _beam(self, one: _Candidate) -> Beam:
        sampler = one.sampler or one.beam.sampler.after(one.token)[0]
        return Beam(-1, one.score, (*one.beam.tokens, one.token), self._logprobs(one), sampler, one.words)

    def _logprobs(self, one: _Candidate) -> tuple[TokenLogprob, ...]:
        if self.params.logprobs is None:
            return ()
        row = self._rows[one.beam.number]
        return (*one.beam.logprobs, TokenLogprob(one.token, float(row.scores[one.token]), row.top))

    # -- what has ended ----------------------------------------------------------------------------------------------

    def _penalised(self, score: float, length: int) -> float:
        return float(np.float32(score) / np.float32(length**self.params.length_penalty))

    def _finish(self, ended: Sequence[_Candidate]) -> None:
        """Keep what has ended, the best of all so far."""
        beams = self.params.beams
        full = len(self.finished) == beams
        if not self._hopeful or (full and self.params.early_stopping is True):
            return
        for one in ended:
            score = self._penalised(one.score, self._length + 1)
            tokens = (*one.beam.tokens, one.token)
            self.finished.append(Hypothesis(score, tokens, self._logprobs(one), one.ends))
        self.finished = sorted(self.finished, key=lambda one: -one.score)[:beams]

    def _may_improve(self, best: float) -> bool:
        """Whether the best beam may become better than the worst of what has ended: exactly so where it is never
        stopped early and longer texts do not score more, else by a rule of thumb."""
        if len(self.finished) < self.params.beams:
            return True
        longest = self.params.early_stopping == "never" and self.params.length_penalty > 0
        return self._penalised(best, self._max_tokens if longest else self._length) > self.finished[-1].score
