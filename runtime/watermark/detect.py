"""Detects whether a text was marked with a key."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import RequestError
from .green_list import green_list
from .gumbel import uniforms
from .settings import Watermark
from .tournament import bits

if TYPE_CHECKING:
    import numpy as np
else:
    from ..late import np

THRESHOLD = 4.0  # Kirchenbauer et al.: one unmarked text in 30,000 is above this


@dataclass(frozen=True)
class Detection:
    """The result of a detection. tokens: how many were examined; repeated n-grams count once. z_score: by how many
    standard deviations the marks exceed chance. p_value: the probability that chance gives as many marks or more.
    green: for "kgw", how many of the tokens are green; else None."""

    tokens: int
    z_score: float
    p_value: float
    green: int | None = None

    @property
    def marked(self) -> bool:
        """Whether the text is marked: chance can be ruled out."""
        return self.z_score >= THRESHOLD


def detect(token_ids: Sequence[int], watermark: Watermark, vocab_size: int) -> Detection:
    """Detect a watermark in the tokens of a text, given without the prompt's tokens and without special tokens at its
    beginning. vocab_size: of the model's logits. RequestError if there are fewer tokens than one mark depends on."""
    starts = watermark.start if watermark.method in ("gumbel", "dual_key_gumbel") else ()
    tokens, width = (*starts, *token_ids), watermark.width
    ngrams = dict.fromkeys(tokens[at : at + width + 1] for at in range(len(tokens) - width))
    if not ngrams:
        needed = width + 1 - len(starts)
        raise RequestError(f"the text has {len(token_ids)} tokens: at least {needed} are needed", field="text")
    if watermark.method == "kgw":
        return _of_green(list(ngrams), watermark, vocab_size)
    first = {ngram[:-1]: ngram[-1] for ngram in reversed(ngrams)}  # tokens after a repeated context are not marked
    return (_of_bits if watermark.method == "synthid" else _of_numbers)(first, watermark, vocab_size)


def _of_green(ngrams: Sequence[tuple[int, ...]], watermark: Watermark, vocab_size: int) -> Detection:
    green = sum(bool(green_list(watermark.keys[0], a, vocab_size, watermark.ratio)[b]) for a, b in ngrams)
    share, count = watermark.ratio, len(ngrams)
    z_score = (green - share * count) / math.sqrt(count * share * (1 - share))
    return Detection(count, z_score, 0.5 * math.erfc(z_score / math.sqrt(2)), green)


def _of_numbers(first: Mapping[tuple[int, ...], int], watermark: Watermark, vocab_size: int) -> Detection:
    """Detect Gumbel-max marks by the sum of a score per token and key; without a mark, a score is exponential with mean
    1."""
    scores = [
        share * -math.log1p(-float(uniforms(key, before, vocab_size, np.array([token]))[0]))
        for key, share in watermark.shares
        for before, token in first.items()
    ]
    total, count, variance = math.fsum(scores), len(first), sum(share**2 for _, share in watermark.shares)
    p_value = gamma_tail(count / variance, total / variance)  # exact for one key; as in vLLM for two
    return Detection(count, (total - count) / math.sqrt(count * variance), p_value)


def _of_bits(first: Mapping[tuple[int, ...], int], watermark: Watermark, vocab_size: int) -> Detection:
    """Detect SynthID marks by the weighted mean of the tokens' bits (Dathathri et al.: weights from 10 to 1, first key
    to last)."""
    weights = np.linspace(10, 1, len(watermark.keys))
    found = np.concatenate([bits(watermark.keys, before, np.array([token])) for before, token in first.items()])
    surplus = ((found - 0.5) @ weights).sum()
    z_score = float(surplus / (0.5 * math.sqrt(len(found) * (weights @ weights))))
    return Detection(len(found), z_score, 0.5 * math.erfc(z_score / math.sqrt(2)))


def gamma_tail(shape: float, value: float) -> float:
    """The probability that a gamma variable of this shape and scale 1 is at least `value`: the regularized upper
    incomplete gamma function, by its series or its continued fraction (DLMF 8.11.4 and 8.9.2)."""
    if value <= 0:
        return 1.0
    front = shape * math.log(value) - value - math.lgamma(shape)
    if value < shape + 1:
        term = total = 1 / shape
        place = shape
        while term > total * 1e-17:
            place += 1
            term *= value / place
            total += term
        return max(1.0 - total * math.exp(front), 0.0)
    below = value + 1 - shape  # modified Lentz
    before, after = math.inf, 1 / below
    fraction = after
    for step in itertools.count(1):
        factor = step * (shape - step)
        below += 2
        after = 1 / (factor * after + below)
        before = below + factor / before
        fraction *= after * before
        if abs(after * before - 1) < 1e-15:
            return fraction * math.exp(front)
    raise AssertionError
