"""For tests of a KV format: run its Triton macros on vectors in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..render import render
from .interpreter import TORCH_TYPES, launch
from .kernels.caches import TRITON_CACHES
from .spec import LaunchSpec


@dataclass(frozen=True)
class CacheCheck:
    """One kernel that converts `rows` vectors of `dim` elements, both powers of two, to codes with the template
    `macros`."""

    macros: str
    scaled: bool
    rows: int
    dim: int


def interpreted_codes(form: str, x: torch.Tensor, scaled: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The codes [rows, dim], scales [rows, 1] (ones without `scaled`) and values [rows, dim] that `quantize` and
    `unpack` of the KV format named `form` give for x, float32 [rows, dim], both powers of two. Values are float32, and
    already multiplied by the scales.

    The environment needs TRITON_INTERPRET=1 before triton is imported: RuntimeError otherwise. CodegenError if Triton
    kernels do not know the format, ValueError if it has no macros.
    """
    cached = TRITON_CACHES.find(form)
    if not cached.macros:
        raise ValueError(f"{form}: elements are floats as they are, and no macro makes them")
    rows, dim = x.shape
    source = render("triton/kv/check.py.jinja", CacheCheck(cached.macros, scaled, rows, dim))
    codes = torch.zeros(rows, dim, dtype=TORCH_TYPES[cached.element])
    scales, values = torch.ones(rows), torch.zeros(rows, dim)
    launch(LaunchSpec(source, "check", (), ()), (1, 1, 1), (x.contiguous(), codes, scales, values))  # type: ignore[arg-type]
    return codes, scales[:, None], values * scales[:, None]
