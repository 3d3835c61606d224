"""Beam search: selects the continuations of a prompt that are extended, and the best finished texts.

As in transformers 5 (`GenerationMixin._beam_search`): all beams are extended by one token, and the likeliest
continuations are considered, twice as many as there are beams, or more if more than one token ends a text.
Continuations that end, and are among the first, are kept by their score, the sum of their log-probabilities divided by
a power of their length; the best of the others become the next beams. Sums are float32, as there. Other modules refuse
requests and copy blocks.
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
    """The text of a beam, needed if strings can end it."""

    detokenizer: Detokenizer
    stop_finder: StopFinder

    def after(self, token_id: int) -> tuple[BeamText, bool]:
        """The state after one more token, and whether a stop string ends the text there."""
        words = BeamText(self.detokenizer.copy(), self.stop_finder.copy())
        _, stopped = words.stop_finder.push(words.detokenizer.push(token_id))
        return words, stopped


@dataclass(slots=True, eq=False)
class Beam:
    """A text that can be continued. number: of the sequence that computes it. score: the sum of its
    log-probabilities."""

    number: int
    score: float
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    sampler: Sampler
    words: BeamText | None


class Hypothesis(NamedTuple):
    """A text as a result: its tokens after the prompt, its score, and why it ends: "stop" or "length"."""

    score: float
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reason: str


class _Row(NamedTuple):
    """The continuations of a beam: float32 log-probabilities `[vocab]`, its likeliest tokens, and those to report with
    their log-probabilities."""

    scores: np.ndarray
    tokens: list[int]
    top: tuple[tuple[int, float], ...]


class _Candidate(NamedTuple):
    """A beam extended by one token."""

    score: float
    beam: Beam
    token: int
    sampler: Sampler | None  # the sampler after the token; None unless it follows a grammar
    words: BeamText | None
    ends: str  # why the text ends here, "" if it does not


class BeamSearch:
    """Call `push` for each of `running`, then `advance`, until that returns an empty list.

    params: resolved, with `beams`. max_tokens: the most tokens of a text. end_ids: tokens that end a text. sampler:
    processes the logits, in its state before any token. words: the text state after the prompt; None if there are no
    stop strings.
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
        """Start again after the prompt."""
        sampler, words = self._first
        self.running = [Beam(0, 0.0, (), (), sampler, words)]
        self.finished: list[Hypothesis] = []
        self._rows: dict[int, _Row] = {}
        self._length = 0
        self._hopeful = True  # whether a beam may become better than the finished texts

    def lost(self) -> None:
        """Drop the logits that were pushed: those of all beams will be pushed again."""
        self._rows.clear()

    def push(self, number: int, logits: np.ndarray) -> bool:
        """Take the logits after a beam, float32 `[vocab]`, which are not modified; False if they are not numbers."""
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
        """Whether the logits of all beams were pushed."""
        return len(self._rows) == len(self.running)

    def advance(self) -> list[tuple[int, int]]:
        """Extend the search by one token. Returns (number of the parent, token) for each new beam, which gets its own
        number from `placed`; an empty list if the search is over. Requires `ready`."""
        assert self.ready
        candidates = self._candidates()
        going_on = [one for one in candidates if not one.ends][: self.params.beams]
        self._finish([one for one in candidates[: self.params.beams] if one.ends])
        self._length += 1
        if going_on:
            self._hopeful = self._hopeful and self._may_improve(going_on[0].score)
        full = len(self.finished) == self.params.beams
        if not going_on:
            self.running = []  # the old beams have not ended, so they are no results
        if not going_on or not self._hopeful or (full and self.params.early_stopping is True):
            return []
        parents = [one.beam.number for one in going_on]
        self.running = [self._beam(one) for one in going_on]
        self._rows.clear()
        return [(parent, one.token) for parent, one in zip(parents, going_on, strict=True)]

    def placed(self, numbers: Sequence[int]) -> None:
        """Set the numbers of the sequences that compute the running beams from now on."""
        for beam, number in zip(self.running, numbers, strict=True):
            beam.number = number

    def best(self, count: int) -> list[Hypothesis]:
        """The best `count` texts, best first: finished ones, and running beams if there are too few."""
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
                    if allowed is not None:  # the grammar refused the token; `allowed` is now exact
                        scores = np.where(allowed, self._rows[beam.number].scores, np.float32(-np.inf))
                        self._rows[beam.number] = self._row(scores)
                        narrowed = True
                        break
                words, ends = self._ends(beam, token)
                candidates.append(_Candidate(score, beam, token, sampler, words, ends))
            if not narrowed:
                return candidates

    def _ends(self, beam: Beam, token: int) -> tuple[BeamText | None, str]:
        """The text state of a continuation, and why it ends; "" if it does not."""
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

    # -- finished texts ----------------------------------------------------------------------------------------------

    def _penalised(self, score: float, length: int) -> float:
        return float(np.float32(score) / np.float32(length**self.params.length_penalty))

    def _finish(self, ended: Sequence[_Candidate]) -> None:
        """Add ended candidates to the finished texts, of which the best are kept."""
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
        """Whether the best beam may become better than the worst finished text. This is exact if early_stopping is
        "never" and longer texts do not score more; else it is a heuristic."""
        if len(self.finished) < self.params.beams:
            return True
        longest = self.params.early_stopping == "never" and self.params.length_penalty > 0
        return self._penalised(best, self._max_tokens if longest else self._length) > self.finished[-1].score
