"""Marks tokens as they are sampled, among those that temperature, top-k, top-p, min-p and grammars leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .green_list import green_list
from .gumbel import uniforms
from .settings import Watermark

if TYPE_CHECKING:
    import numpy as np
else:
    from ..late import np


class Marking(Protocol):
    """Changes what the next token of one completion is sampled from."""

    def biased(self, logits: np.ndarray) -> np.ndarray:
        """The logits `[vocab]` whose largest a greedy answer takes; the same array if there is nothing to change."""
        ...

    def weighed(self, candidates: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
        """The weights of the candidates, None for all tokens, by which one is drawn."""
        ...

    def push(self, token: int) -> None:
        """A token that was sampled."""
        ...


def marking(watermark: Watermark, prompt: Sequence[int], vocab_size: int) -> Marking:
    """The marking of one completion of a prompt."""
    kind = GreenMarking if watermark.method == "kgw" else GumbelMarking
    return kind(watermark, prompt, vocab_size)


class GreenMarking(Marking):
    """Adds to the logits of the tokens that the token before picks."""

    def __init__(self, watermark: Watermark, prompt: Sequence[int], vocab_size: int) -> None:
        self._watermark, self._vocab_size = watermark, vocab_size
        self._before = prompt[-1] if prompt else None

    def biased(self, logits: np.ndarray) -> np.ndarray:
        if self._before is None:
            return logits
        return np.where(self._green(), logits + np.float32(self._watermark.bias), logits)

    def weighed(self, candidates: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
        if self._before is None:
            return weights
        green = self._green() if candidates is None else self._green()[candidates]
        return np.where(green, weights * np.exp(self._watermark.bias), weights)

    def push(self, token: int) -> None:
        self._before = token

    def _green(self) -> np.ndarray:
        assert self._before is not None
        return green_list(self._watermark.key, self._before, self._vocab_size, self._watermark.ratio)


class GumbelMarking(Marking):
    """Takes the token of the largest number ** (1 / probability). Where the tokens before were there already in this
    answer, the token is drawn as without a mark: else texts would go round in circles."""

    def __init__(self, watermark: Watermark, prompt: Sequence[int], vocab_size: int) -> None:
        self._watermark, self._vocab_size = watermark, vocab_size
        self._before = tuple(prompt[-watermark.width :])
        self._seen: set[tuple[int, ...]] = set()

    def biased(self, logits: np.ndarray) -> np.ndarray:
        return logits

    def weighed(self, candidates: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
        if self._before in self._seen or len(self._before) < self._watermark.width:
            return weights
        numbers = uniforms(self._watermark.key, self._before, self._vocab_size)
        numbers = numbers if candidates is None else numbers[candidates]
        possible = weights > 0
        scores = np.full(len(weights), -np.inf)
        scores[possible] = np.log(numbers[possible]) / weights[possible].astype(np.float64)
        chosen = np.zeros(len(weights))
        chosen[scores.argmax()] = 1.0
        return chosen

    def push(self, token: int) -> None:
        self._seen.add(self._before)
        self._before = (*self._before, token)[-self._watermark.width :]
