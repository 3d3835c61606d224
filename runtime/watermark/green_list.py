"""The green tokens that the previous token selects, the same as in transformers: a part of torch's random
permutation."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
else:
    from ..late import np

_WHOLE = 2**64 - 1  # seeds are modulo this in transformers


@lru_cache(maxsize=1024)  # 128k tokens take 16 KB
def _packed(key: int, before: int, vocab_size: int, count: int) -> np.ndarray:
    green = np.zeros(vocab_size, dtype=bool)
    green[permuted(key * before % _WHOLE, vocab_size, count)] = True
    return np.packbits(green)


def green_list(key: int, before: int, vocab_size: int, ratio: float) -> np.ndarray:
    """The tokens that are green after the token `before`, bool `[vocab]`; a share `ratio` of all."""
    packed = _packed(key, before, vocab_size, int(vocab_size * ratio))
    return np.unpackbits(packed, count=vocab_size).view(bool)


def permuted(seed: int, size: int, count: int) -> np.ndarray:
    """The first `count` of torch.randperm(size) with a CPU generator of this seed, int64 `[count]`.

    torch shuffles from the left: step i swaps places i and j[i] = i + random() % (size - i), with the 32-bit numbers of
    a Mersenne twister seeded with the lowest 32 bits. Place i gets the value at place j[i]: j[i] itself, or the value
    that the last earlier step with the same j put there, which is the value at that step's own place then. All steps
    are computed at once. size: below 2^32 / 20, above which torch uses another algorithm.
    """
    steps = min(count, size - 1)
    own = np.arange(steps)
    random = np.random.RandomState(seed & 0xFFFFFFFF).randint(0, 1 << 32, size=steps, dtype=np.uint32)
    drawn = own + random.astype(np.int64) % (size - own)
    put = np.full(size, -1)  # the last step that put something at a place on the left, before that place's own step
    moves = (drawn != own) & (drawn < steps)
    put[drawn[moves]] = own[moves]
    held = np.where(put[:steps] >= 0, put[:steps], own)  # for the value at place i before step i: its original place
    while not np.array_equal(further := held[held], held):
        held = further
    found = np.where(drawn == own, held, drawn)
    again, earlier = _repeated(drawn, size)
    found[again] = held[earlier]
    if count <= steps:
        return found
    last = np.setdiff1d(np.arange(size), found, assume_unique=True)  # for a whole permutation one value is left
    return np.concatenate([found, last])


def _repeated(drawn: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The steps that draw a place drawn before, and for each the last earlier step that drew it; int64 [repeated]
    each."""
    own = np.arange(len(drawn))
    first, last = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    last[drawn] = own
    first[drawn[::-1]] = own[::-1]
    several = own[first[drawn] != last[drawn]]
    several = several[np.argsort(drawn[several], kind="stable")]
    same = drawn[several[1:]] == drawn[several[:-1]]
    return several[1:][same], several[:-1][same]
