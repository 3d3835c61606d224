"""The numbers that tokens get of a key and the tokens before."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
else:
    from ..late import np


def uniforms(key: int, before: Sequence[int], vocab_size: int) -> np.ndarray:
    """A number in (0, 1] for each token, float64 `[vocab]`: the same for the same key and tokens before."""
    said = struct.pack(f"<Q{len(before)}I", key, *before)
    seed = int.from_bytes(hashlib.blake2b(said, digest_size=16).digest(), "little")
    return 1.0 - np.random.Generator(np.random.Philox(key=seed)).random(vocab_size)
