"""icc's own block formats, for the choice of bits per weight by `--quant auto`.

They are ggml's ideas with blocks that fit any width: integer scales per small group times one float16 scale per block
of some hundred values (k-quants), and tables of levels that are, like weights, densest around zero (IQ4_NL and
ik_llama.cpp's IQ2_K and IQ3_K, whose tables these are). s: integer levels around zero; n: levels from a table; a:
integer levels above a minimum per group. n4g32b192 is a table of 16 levels, a scale per 32 values, and one per 192.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .base import Misfit
from .blocks import BlockFormat

_TABLES = {
    2: (-31, -13, 1, 17),
    3: (-63, -40, -23, -10, 1, 13, 28, 47),
    4: (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
_NAME = re.compile(r"([san])([234568])g(16|32|64)b(\d+)")
_MOST = 320  # most values of a block
_KINDS: dict[str, Callable[[str, int, int, int], BlockFormat]] = {
    "s": lambda name, bits, group, size: BlockFormat(
        name, bits, group, size, zero=2 ** (bits - 1), group_scales="i8"
    ),
    "n": lambda name, bits, group, size: BlockFormat(
        name, bits, group, size, table=_TABLES[bits], group_scales="i8"
    ),
    "a": lambda name, bits, group, size: BlockFormat(
        name, bits, group, size, mins=True, group_scales="u6"
    ),
}  # fmt: skip


def mixed(kind: str, bits: int, group: int, k: int) -> BlockFormat:
    """The format for rows of `k` values, with the largest block. Misfit if no block of whole groups divides them."""
    step = max(group, 32)  # the upper bits of codes are stored in lines of 32 values
    sizes = [size for size in range(step, _MOST + 1, step) if k % size == 0 and size % group == 0]
    if not sizes:
        raise Misfit(f"K = {k} is not a multiple of {step}")
    return _make(kind, bits, group, sizes[-1])


def find_mixed(name: str) -> BlockFormat | None:
    """A format by its name; None if the name is none of these."""
    found = _NAME.fullmatch(name)
    if found is None or (found[1] == "n" and int(found[2]) not in _TABLES):
        return None
    kind, bits, group, size = found[1], int(found[2]), int(found[3]), int(found[4])
    return _make(kind, bits, group, size) if 0 < size <= _MOST and size % max(group, 32) == 0 else None


def _make(kind: str, bits: int, group: int, size: int) -> BlockFormat:
    return _KINDS[kind](f"{kind}{bits}g{group}b{size}", bits, group, size)
