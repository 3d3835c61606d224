"""The pseudorandom numbers of tokens for Gumbel-max, from a key and the tokens before. They equal vLLM's
(vllm/v1/watermarking, PRF "philox"), so that icc and vLLM detect each other's marks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
else:
    from ..late import np

_LOW = 2**32 - 1
# Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3": Philox4x32-10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_CONTEXT, _TOKEN = 0x574D4358, 0x574D544B  # distinguishes the two uses of the generator

Words = Sequence["int | np.ndarray"]  # four words of 32 bits


def uniforms(key: int, before: Sequence[int], vocab_size: int, tokens: np.ndarray | None = None) -> np.ndarray:
    """A number in (0, 1) for each of `tokens` (None: the whole vocabulary), float32 `[tokens]`. It depends on the key
    and the tokens `before`, of which -1 stands for positions before the first token."""
    low, high = key & _LOW, key >> 32
    state: Words = _CONTEXT, len(before), 0, 0
    for at in range(0, len(before), 4):
        block = [token & _LOW for token in before[at : at + 4]]
        block += [_LOW - place for place in range(len(block), 4)]
        state = _philox([a ^ b for a, b in zip(state, block, strict=True)], low ^ at, high)
    blocks = np.arange((vocab_size + 3) // 4) if tokens is None else tokens >> 2
    words = _philox([blocks.astype(np.uint64), *state[:3]], low ^ int(state[3]), high ^ _TOKEN)
    found = np.stack(words, axis=-1)
    found = found.reshape(-1)[:vocab_size] if tokens is None else found[np.arange(len(tokens)), tokens & 3]
    return (((found >> 8) + 1.0) / (2**24 + 1)).astype(np.float32)


def _philox(counter: Words, low: int, high: int) -> Words:
    """Ten rounds of Philox4x32, on integers or uint64 arrays of 32-bit words."""
    one, two, three, four = counter
    for _ in range(10):
        first, second = one * _MULTIPLIERS[0], three * _MULTIPLIERS[1]
        one, two, three, four = (second >> 32) ^ two ^ low, second & _LOW, (first >> 32) ^ four ^ high, first & _LOW
        low, high = (low + _WEYL[0]) & _LOW, (high + _WEYL[1]) & _LOW
    return one, two, three, four


def two_keys(key: int) -> tuple[int, int]:
    """vLLM's keys A and B, derived from one key."""
    digests = [hashlib.sha256(domain + key.to_bytes(8, "big")).digest() for domain in (b"key_a", b"key_b")]
    return int.from_bytes(digests[0][:8], "big"), int.from_bytes(digests[1][:8], "big")
