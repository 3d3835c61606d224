"""Tells whether a text was marked with a key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import RequestError
from .green_list import green_list
from .gumbel import uniforms
from .settings import Watermark

THRESHOLD = 4.0  # Kirchenbauer et al.: one text in 30,000 that nobody marked is above


@dataclass(frozen=True)
class Detection:
    """What a text shows. tokens: that were looked at, each with those before it once; z_score: by how many standard
    deviations they are more marked than chance would have it; p_value: how likely chance makes it so or more; green: of
    "kgw", how many of the tokens are green."""

    tokens: int
    z_score: float
    p_value: float
    green: int | None = None

    @property
    def marked(self) -> bool:
        """Whether chance can be ruled out."""
        return self.z_score >= THRESHOLD


def detect(token_ids: Sequence[int], watermark: Watermark, vocab_size: int) -> Detection:
    """What the tokens of a text show of a watermark; without those of the prompt and special ones at its beginning.
    vocab_size: of the model's logits. RequestError for fewer tokens than a mark hangs on."""
    width = watermark.width
    ngrams = dict.fromkeys(tuple(token_ids[at : at + width + 1]) for at in range(len(token_ids) - width))
    if not ngrams:
        raise RequestError(f"the text has {len(token_ids)} tokens: at least {width + 1} are needed", field="text")
    if watermark.method == "kgw":
        return _of_green(list(ngrams), watermark, vocab_size)
    first = {ngram[:-1]: ngram[-1] for ngram in reversed(ngrams)}  # where the tokens before come again, none is marked
    numbers = [float(uniforms(watermark.key, before, vocab_size)[token]) for before, token in first.items()]
    scores = [-math.log(max(1.0 - number, 1e-300)) for number in numbers]
    total, count = math.fsum(scores), len(scores)
    return Detection(count, (total - count) / math.sqrt(count), gamma_tail(count, total))


def _of_green(ngrams: Sequence[tuple[int, ...]], watermark: Watermark, vocab_size: int) -> Detection:
    green = sum(bool(green_list(watermark.key, a, vocab_size, watermark.ratio)[b]) for a, b in ngrams)
    share, count = watermark.ratio, len(ngrams)
    z_score = (green - share * count) / math.sqrt(count * share * (1 - share))
    return Detection(count, z_score, 0.5 * math.erfc(z_score / math.sqrt(2)), green)


def gamma_tail(count: int, value: float) -> float:
    """How likely the sum of so many exponential variables of mean 1 is to reach a value: exp(-x) times the sum of
    x^k / k! over k < count."""
    if value <= 0:
        return 1.0
    logs = [k * math.log(value) - math.lgamma(k + 1) - value for k in range(count)]
    largest = max(logs)
    return min(math.exp(largest) * math.fsum(math.exp(one - largest) for one in logs), 1.0)
