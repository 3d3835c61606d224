"""The arguments of attention besides its tensors, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..constant_argument import ConstantArgument
from ..eviction import Eviction

ALL_AHEAD = -1  # every later token of the sequence


@dataclass(frozen=True)
class AttentionMask(ConstantArgument):
    """Which keys a query sees, by their positions.

    window: only the last `window` keys up to the query's own (0: all earlier ones). chunk: only keys in the query's own
    chunk of `chunk` tokens (0: all). ahead: also `ahead` later keys (0: none, causal; ALL_AHEAD: all).
    """

    window: int = 0
    chunk: int = 0
    ahead: int = 0

    def visible(self, positions: Tensor) -> Tensor:
        """Boolean [T, T]: may the query at positions[i] attend to the key at positions[j]?"""
        return self.allows(positions[:, None], positions[None, :])

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        """Boolean, in the shape that q and k are broadcast to: may queries at the positions q attend to keys at the
        positions k?"""
        allowed = torch.ones_like(k <= q) if self.ahead == ALL_AHEAD else k <= q + self.ahead
        if self.window:
            allowed = allowed & (k > q - self.window)
        if self.chunk:
            allowed = allowed & (k // self.chunk == q // self.chunk)
        return allowed

    @property
    def keeps_all(self) -> bool:
        """Whether every earlier key is seen, and no later one."""
        return not (self.window or self.chunk or self.ahead)


@dataclass(frozen=True)
class AttentionSpec(ConstantArgument):
    """The numbers of one attention layer.

    layer: the number of its KV cache; layers with one number read the same cache. scale: factor of the products of
    queries and keys; 0 weighs all visible keys equally. softcap: scores become softcap * tanh(score / softcap) (0:
    unchanged). later, key_later: columns of `row_bias` and `key_bias` that are for later keys. rope: how rotary
    embedding pairs the dims of a vector, "half" or "interleaved". policy: which tokens the cache drops; None keeps all.
    cached: keys and values are cached even if the mask sees later tokens, of which then only those of the same step are
    seen.
    """

    layer: int
    scale: float
    mask: AttentionMask = AttentionMask()
    softcap: float = 0.0
    later: int = 0
    key_later: int = 0
    rope: Literal["half", "interleaved"] = "half"
    policy: Eviction | None = None
    cached: bool = False

    @property
    def within_step(self) -> bool:
        """Whether a sequence must run in one step, and nothing of it is cached."""
        return self.mask.ahead != 0 and not self.cached
