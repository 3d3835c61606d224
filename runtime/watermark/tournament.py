"""SynthID-Text's bits of tokens, from its keys and the previous tokens (Dathathri et al. 2024,
doi:10.1038/s41586-024-08025-4), as in transformers, and the tournament by which they change probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
else:
    from ..late import np

_TABLE = 1 << 16  # transformers' defaults: the number of bits, drawn with seed 0
_MULTIPLIER = 6364136223846793005


@cache
def _table() -> np.ndarray:
    """torch.randint(0, 2, [65536]) with seed 0, uint8: the lowest bits of a Mersenne twister's numbers."""
    drawn = np.random.RandomState(0).randint(0, 1 << 32, size=_TABLE, dtype=np.uint32)
    return (drawn & 1).astype(np.uint8)


def bits(keys: Sequence[int], before: Sequence[int], tokens: np.ndarray) -> np.ndarray:
    """A bit for each token and key after the tokens `before`, uint8 `[tokens, keys]`."""
    state = np.ones(1, dtype=np.uint64)
    for values in [*np.array(before, dtype=np.uint64)[:, None], tokens.astype(np.uint64)]:
        state = _hashed(state, values)
    return _table()[_hashed(state[:, None], np.array(keys, dtype=np.uint64)) % _TABLE]


def _hashed(state: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One step of a linear congruential generator, uint64, modulo 2^64."""
    return (state + values) * _MULTIPLIER + 1


def tournament(weights: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Probabilities after a tournament with one round per key, float64 `[tokens]`. In each round, the probability of a
    token with the bit is multiplied by 1 + q, and of one without it by 1 - p: q is the total probability of tokens
    without the bit, p of those with it."""
    found = weights / weights.sum(dtype=np.float64)
    for bit in bits.T:
        found = found * (1.0 + bit - (bit * found).sum())
    return found
