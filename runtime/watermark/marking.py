"""Marks tokens while they are sampled, among those left by temperature, top-k, top-p, min-p and grammars."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .green_list import green_list
from .gumbel import uniforms
from .settings import Watermark
from .tournament import bits, tournament

if TYPE_CHECKING:
    import numpy as np
else:
    from ..late import np


class Marking(Protocol):
    """Changes the distribution from which the next token of one completion is sampled."""

    def biased(self, logits: np.ndarray) -> np.ndarray:
        """The logits `[vocab]` for greedy decoding; the same array if nothing is changed."""
        ...

    def weighed(self, candidates: np.ndarray | None, weights: np.ndarray, uniform: float) -> np.ndarray:
        """The changed weights `[n]` for drawing a token. candidates: token ids `[n]`, None for all tokens. uniform: the
        number in [0, 1) with which it is drawn."""
        ...

    def push(self, token: int) -> None:
        """Take in a token that was sampled."""
        ...


def marking(watermark: Watermark, prompt: Sequence[int], vocab_size: int) -> Marking:
    """The marking of one completion of a prompt. vocab_size: in tokens."""
    if watermark.method == "kgw":
        return GreenMarking(watermark, prompt, vocab_size)
    return TournamentMarking(watermark) if watermark.method == "synthid" else GumbelMarking(watermark, vocab_size)


class GreenMarking(Marking):
    """Adds a bias to the logits of the tokens that the previous token selects."""

    def __init__(self, watermark: Watermark, prompt: Sequence[int], vocab_size: int) -> None:
        self._watermark, self._vocab_size = watermark, vocab_size
        self._before = prompt[-1] if prompt else None

    def biased(self, logits: np.ndarray) -> np.ndarray:
        if self._before is None:
            return logits
        return np.where(self._green(), logits + np.float32(self._watermark.bias), logits)

    def weighed(self, candidates: np.ndarray | None, weights: np.ndarray, uniform: float) -> np.ndarray:
        if self._before is None:
            return weights
        green = self._green() if candidates is None else self._green()[candidates]
        return np.where(green, weights * np.exp(self._watermark.bias), weights)

    def push(self, token: int) -> None:
        self._before = token

    def _green(self) -> np.ndarray:
        assert self._before is not None
        return green_list(self._watermark.keys[0], self._before, self._vocab_size, self._watermark.ratio)


class GumbelMarking(Marking):
    """Chooses the token with the largest number ** (1 / probability). If the preceding tokens occurred already in this
    answer, the token is drawn without a mark, because texts could run in circles otherwise."""

    def __init__(self, watermark: Watermark, vocab_size: int) -> None:
        self._shares, self._vocab_size = watermark.shares, vocab_size
        self._before = watermark.start
        self._seen: set[tuple[int, ...]] = set()

    def biased(self, logits: np.ndarray) -> np.ndarray:
        return logits

    def weighed(self, candidates: np.ndarray | None, weights: np.ndarray, uniform: float) -> np.ndarray:
        if self._before in self._seen:
            return weights
        (key, share), *others = self._shares
        if uniform >= share:
            [(key, _)] = others
        numbers = uniforms(key, self._before, self._vocab_size, candidates)
        possible = weights > 0
        scores = np.full(len(weights), -np.inf)
        scores[possible] = np.log(numbers[possible].astype(np.float64)) / weights[possible].astype(np.float64)
        chosen = np.zeros(len(weights))
        chosen[scores.argmax()] = 1.0
        return chosen

    def push(self, token: int) -> None:
        self._seen.add(self._before)
        self._before = (*self._before[1:], token)


class TournamentMarking(Marking):
    """Changes probabilities by tournaments of the tokens' bits; after a repeated context they are not changed."""

    def __init__(self, watermark: Watermark) -> None:
        self._keys, self._before = watermark.keys, watermark.start
        self._seen: deque[tuple[int, ...]] = deque(maxlen=1024)  # as many as in transformers

    def biased(self, logits: np.ndarray) -> np.ndarray:
        weights = np.exp(logits - logits.max(), dtype=np.float64)
        changed = self.weighed(None, weights, 0.0)
        return logits if changed is weights else changed

    def weighed(self, candidates: np.ndarray | None, weights: np.ndarray, uniform: float) -> np.ndarray:
        if self._before in self._seen:
            return weights
        possible = np.flatnonzero(weights)
        tokens = possible if candidates is None else candidates[possible]
        changed = np.zeros(len(weights))
        changed[possible] = tournament(weights[possible], bits(self._keys, self._before, tokens))
        return changed

    def push(self, token: int) -> None:
        self._seen.append(self._before)
        self._before = (*self._before[1:], token)
