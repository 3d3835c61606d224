"""How the CPU backend stores values: float32 activations, tiles of weights, int8 rows for quantized products."""

from __future__ import annotations

from ..lower.profile import Profile
from .formats import packed_nbytes

CPU_PROFILE = Profile(dense="tile_{}", quant="q{}", packed_nbytes=packed_nbytes, int8_activations=True)
