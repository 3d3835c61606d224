"""Sampler: chooses one request's next token from one row of logits. Its result depends on nothing else in the batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..executor.sampling import SamplingRow
from ..watermark.marking import Marking, marking
from .params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
else:
    from ..late import np

_FIRST_GUESS = 1024  # candidates for top-p; nearly always they have enough probability


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probabilities at one position, from the model's own logits (before temperature and penalties)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest (token id, logprob), best first


class SampledToken(NamedTuple):
    """A sampled token. `logprob` is None unless it was asked for."""

    token_id: int
    logprob: TokenLogprob | None = None


class AcceptedTokens(NamedTuple):
    """The new tokens of a request after a step: one more than the number of accepted guesses.

    The last is None if the logits were not numbers. `row` is its logit row, counted from the request's first.
    """

    samples: tuple[SampledToken | None, ...]
    accepted: tuple[int, ...]
    row: int


class Constraint(Protocol):
    """Restricts the tokens of one request: the state of its text in a grammar."""

    def allowed(self) -> np.ndarray:
        """The tokens that may come next, bool `[vocab]`."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance by an allowed token. False, with the state unchanged, if it is refused after all; `allowed` is then
        exact."""
        ...

    def copy(self) -> Constraint:
        """A copy in the same state."""
        ...


# makes a constraint for each completion
Constrain = Callable[[], Constraint]


class Sampler:
    """The sampling state of one request: its random stream and the tokens it has seen.

    `params` must be resolved. `index` is that of the completion among the n of a prompt: each has its own random
    stream. `end_ids` are the tokens that may not be sampled before `min_tokens`. `constraint` limits the tokens to a
    grammar; None: there is none.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        end_ids: Collection[int] = (),
        index: int = 0,
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self._constraint = constraint
        self._random: np.random.Generator | None = None
        self._device_seed = 0
        if not params.greedy:
            seeds = np.random.SeedSequence(None if params.seed is None else [params.seed, index])
            self._random = np.random.Generator(np.random.PCG64(seeds))
            self._device_seed = int(seeds.generate_state(1, np.uint64)[0])
        self._num_sampled = 0
        self._end_ids, self._biased = sorted(end_ids), list(params.logit_bias)
        self._biases = np.array(list(params.logit_bias.values()), dtype=np.float32) if params.logit_bias else None
        self._forbidden: np.ndarray | None = None  # bool [vocab]: tokens that are never sampled
        if params.allowed_token_ids is not None:
            self._forbidden = np.ones(vocab_size, dtype=bool)
            self._forbidden[np.asarray(params.allowed_token_ids, dtype=np.int64)] = False
        self._recent: list[int] = []  # the last output tokens, as many as bad words need
        self._seen: np.ndarray | None = None  # bool [vocab]: tokens of prompt and output
        if params.repetition_penalty not in (None, 1.0):
            self._seen = np.zeros(vocab_size, dtype=bool)
            self._seen[np.asarray(prompt, dtype=np.int64)] = True
        self._counts: np.ndarray | None = None  # float32 [vocab]: counts in the output
        if params.presence_penalty or params.frequency_penalty:
            self._counts = np.zeros(vocab_size, dtype=np.float32)
        self._marking: Marking | None = None
        if params.watermark is not None:
            self._marking = marking(params.watermark, prompt, vocab_size)
        changing = (self._seen, self._counts, self._constraint, self._forbidden, self._marking)
        # whether the request's logits are modified at every step
        self._adjusts = any(part is not None for part in changing) or bool(self._biased) or bool(params.bad_words)
        self._device_row: SamplingRow | None = None
        if not self._adjusts and not params.min_tokens and not params.score_ids:
            top_p = 1.0 if params.top_p is None else params.top_p
            knobs = params.temperature or 0.0, params.top_k or 0, top_p, params.min_p or 0.0
            self._device_row = SamplingRow(*knobs, self._device_seed, 0)

    def sample(self, logits: np.ndarray) -> SampledToken | None:
        """The next token from float32 `[vocab]`, which is not modified; None if the logits are not numbers."""
        best = int(logits.argmax())
        if not isfinite(logits[best]):  # argmax finds the first NaN, if there is one
            return None
        token = self._choose(logits, best)
        if self._constraint is not None and token is not None and not self._constraint.accept(token):
            token = self._choose(logits, best)
            if token is not None and not self._constraint.accept(token):
                return None
        if token is None:
            return None
        self._count(token)
        return self._sample(logits, token)

    def _count(self, token: int) -> None:
        self._num_sampled += 1
        if self.params.bad_words:
            self._recent = [*self._recent, token][-max(map(len, self.params.bad_words)) :]
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1
        if self._marking is not None:
            self._marking.push(token)

    # -- beams -------------------------------------------------------------------------------------------------------

    def log_probabilities(self, logits: np.ndarray) -> np.ndarray | None:
        """Log-probabilities of the next token, float32 `[vocab]`, with penalties and biases applied, minus infinity for
        tokens that are not allowed; None if the logits are not numbers. As in transformers, they are not normalized
        again after that."""
        best = float(logits.max())
        if not isfinite(best):
            return None
        away = logits - np.float32(best)
        return self._adjust(away - np.float32(np.log(np.exp(away).sum(dtype=np.float64))))

    @property
    def follows_grammar(self) -> bool:
        """Whether a grammar restricts the next token."""
        return self._constraint is not None

    def after(self, token: int) -> tuple[Sampler, np.ndarray | None]:
        """The sampler of this request after one more token, and None. If the grammar refuses the token: an unusable
        sampler, and the allowed tokens, bool `[vocab]`."""
        other = copy(self)
        if self._constraint is not None:
            other._constraint = self._constraint.copy()
            if not other._constraint.accept(token):
                return other, other._constraint.allowed()
        other._seen = None if self._seen is None else self._seen.copy()
        other._counts = None if self._counts is None else self._counts.copy()
        other._count(token)
        return other, None

    def _choose(self, logits: np.ndarray, best: int) -> int | None:
        """Choose a token; None if no allowed token can be sampled."""
        adjusted = self._adjust(logits)
        if adjusted is not logits:
            best = int(adjusted.argmax())
        if not isfinite(adjusted[best]):
            return None
        if self._marking is not None and self._random is None:
            best = int(self._marking.biased(adjusted).argmax())
        token = best if self._random is None else draw(adjusted, self.params, self._random.random(), self._marking)
        return token if isfinite(adjusted[token]) else None

    @property
    def is_argmax(self) -> bool:
        """Whether only the token of the largest logit is needed of the logits."""
        params = self.params
        return self._random is None and params.logprobs is None and not params.min_tokens and not self._adjusts

    @property
    def wanted(self) -> int:
        """How many of the largest logits the next token and its log-probabilities depend on; 0: on all."""
        if self.is_argmax:
            return 1
        params = self.params
        return (params.top_k or 0) if self.is_plain and params.logprobs is None and not params.score_ids else 0

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from the model's unmodified logits, independent of earlier tokens."""
        return self._random is not None and not self._adjusts and not self.params.min_tokens

    def distribution(self, logits: np.ndarray) -> np.ndarray:
        """The probabilities, float64 `[vocab]`, by which the next token is drawn from finite logits. Requires
        `is_plain`."""
        assert self.is_plain
        candidates, weights = _weights(logits, self.params)
        found = np.zeros(len(logits))
        found[slice(None) if candidates is None else candidates] = weights
        return found / found.sum()

    def take(self, logits: np.ndarray, token: int) -> SampledToken:
        """Count a token that was chosen without the request's random stream; logits: float32 `[vocab]`. Requires
        `is_plain`."""
        assert self.is_plain
        self._num_sampled += 1
        return self._sample(logits, token)

    def _sample(self, logits: np.ndarray, token: int) -> SampledToken:
        top = self.params.logprobs
        return SampledToken(token, None if top is None else token_logprob(logits, token, top, self.params.score_ids))

    def device_row(self, ahead: int = 0) -> SamplingRow | None:
        """How a device samples the token `ahead` tokens after the next one; None if only the host can.

        The device does not support penalties, biases and grammars. Its random stream differs from the host's. Whether
        the device or the host samples depends only on the request's parameters, so that a seed gives the same tokens
        whatever other requests run.
        """
        row = self._device_row
        return None if row is None else SamplingRow(*row[:-1], self._num_sampled + ahead)

    def count_device_sample(self) -> None:
        """Count one more token that a device has sampled."""
        self._num_sampled += 1

    def _adjust(self, logits: np.ndarray) -> np.ndarray:
        """Apply penalties, biases and forbidden end tokens to logits [vocab]; returns the same array if there are
        none."""
        hold = self._num_sampled < self.params.min_tokens and bool(self._end_ids)
        if not self._adjusts and not hold:
            return logits
        logits = logits.copy()
        if self._seen is not None:
            penalty = np.float32(self.params.repetition_penalty)
            seen = logits[self._seen]
            logits[self._seen] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._counts is not None:
            logits -= np.float32(self.params.frequency_penalty) * self._counts
            logits -= np.float32(self.params.presence_penalty) * (self._counts > 0)
        if self._biases is not None:
            logits[self._biased] += self._biases
        if hold:
            logits[self._end_ids] = -np.inf
        if self._forbidden is not None:
            logits[self._forbidden] = -np.inf
        for *before, last in self.params.bad_words:
            if not before or self._recent[-len(before) :] == before:
                logits[last] = -np.inf
        if self._constraint is not None:
            logits[~self._constraint.allowed()] = -np.inf
        return logits


def draw(logits: np.ndarray, params: SamplingParams, uniform: float, marking: Marking | None = None) -> int:
    """The token at `uniform` in [0, 1) of the distribution after temperature, top-k, top-p, min-p and a watermark.

    logits: float32 `[vocab]`. marking: that of the watermark; None: there is none."""
    candidates, weights = _weights(logits, params)
    if marking is not None:
        weights = marking.weighed(candidates, weights, uniform)
    cumulative = np.cumsum(weights, dtype=np.float64)
    position = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    position = min(position, int(np.flatnonzero(weights)[-1]))  # rounding may put uniform * total at the very end
    return position if candidates is None else int(candidates[position])


def _weights(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray | None, np.ndarray]:
    """The candidates for a draw, None for all tokens, and the weight of each.

    Weights are float32, sums of them float64. Candidates, if not all tokens, are in descending order of probability.
    """
    assert params.temperature
    top_k, top_p, min_p = params.top_k or 0, 1.0 if params.top_p is None else params.top_p, params.min_p or 0.0
    candidates = largest_of(logits, top_k) if 0 < top_k < len(logits) else None
    kept = logits if candidates is None else logits[candidates]
    weights = np.exp((kept - kept.max()) / np.float32(params.temperature))
    if top_p < 1.0:
        inside = _nucleus(weights, top_p, ordered=candidates is not None)
        candidates = inside if candidates is None else candidates[inside]
        weights = weights[inside]
    if min_p > 0.0:
        weights = np.where(weights >= min_p, weights, 0.0)  # the largest weight is exp(0) = 1
    return candidates, weights


def largest_of(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest of values `[n]`, largest first, of equals the lower index first."""
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    kept = np.argpartition(values, len(values) - count)[len(values) - count :]
    # argpartition chooses arbitrarily among values equal to the smallest kept one: take the lowest indices instead
    smallest = values[kept].min()
    above = kept[values[kept] > smallest]
    kept = np.concatenate([above, np.flatnonzero(values == smallest)[: count - len(above)]])
    return kept[np.lexsort((kept, -values[kept]))]


def _nucleus(weights: np.ndarray, top_p: float, ordered: bool) -> np.ndarray:
    """Indices of the smallest set of largest weights with `top_p` of the sum of weights, at least one, largest
    first."""
    goal = top_p * weights.sum(dtype=np.float64)
    size = len(weights) if ordered else min(_FIRST_GUESS, len(weights))
    while True:
        order = np.arange(size) if ordered else largest_of(weights, size)
        cumulative = np.cumsum(weights[order], dtype=np.float64)
        if cumulative[-1] >= goal or size == len(weights):
            return order[: int(np.searchsorted(cumulative, goal, side="left")) + 1]
        size = min(size * 8, len(weights))


def token_logprob(logits: np.ndarray, token: int, top: int, wanted: Sequence[int] = ()) -> TokenLogprob:
    """Log-probabilities of `token` and of the `wanted` tokens, or if there are none of the `top` likeliest, from logits
    float32 `[vocab]`."""
    largest = logits.max()
    log_total = float(largest) + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
    best: Iterable[int] = wanted or (largest_of(logits, min(top, len(logits))) if top else ())
    pairs = tuple((int(index), float(logits[index]) - log_total) for index in best)
    return TokenLogprob(token, float(logits[token]) - log_total, pairs)
