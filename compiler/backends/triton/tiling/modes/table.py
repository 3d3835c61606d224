"""Which mode a product runs in."""

from __future__ import annotations

from ...layouts.codes import CodeGroups
from ..product import ProductMode
from .eight import Fp8GroupsMode, Fp8Mode, Int8GroupsMode, Int8Mode
from .micro import MicroMode
from .values import BlocksMode, CodesMode, DenseMode
from .wide import WideMode

DENSE_MODE, CODES_MODE, BLOCKS_MODE, WIDE_MODE = DenseMode(), CodesMode(), BlocksMode(), WideMode()
_EIGHT: tuple[ProductMode, ...] = (Int8Mode(), Fp8Mode(), MicroMode())
ROWS8 = {mode.name: mode for mode in _EIGHT}  # by the names that `CodeGroups.rows8` returns
_GROUPS: tuple[ProductMode, ...] = (Int8GroupsMode(), Fp8GroupsMode())
MANY_ROWS8 = {mode.coding: mode for mode in _GROUPS}  # by the names that `CodeGroups.many_rows8` returns


def mode_of(codes: CodeGroups | None, x_type: str, w_type: str, level: int, experts: bool) -> ProductMode:
    """How operands are multiplied on a GPU of that compute capability, 0 for HIP. codes: the layout of W; None if W is
    dense."""
    eight = ROWS8.get(codes.rows8(level)) if codes else None
    if eight and not (eight.exact and experts):  # experts' rows are not smoothed
        return eight
    narrow = x_type in ("bf16", "f16")
    if codes:
        if narrow and codes.fits_matrix_units:
            return CODES_MODE
        return BLOCKS_MODE if narrow and codes.as_values else WIDE_MODE
    return DENSE_MODE if narrow and w_type == x_type else WIDE_MODE


def many_mode_of(codes: CodeGroups | None, level: int, experts: bool) -> ProductMode | None:
    """How operands may be multiplied instead if there are many rows; None for no other way."""
    found = MANY_ROWS8.get(codes.many_rows8(level)) if codes else None
    return None if found and found.exact and experts else found  # as in `mode_of`
