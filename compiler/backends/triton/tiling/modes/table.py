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
ROWS8 = {mode.name: mode for mode in _EIGHT}  # by what `CodeGroups.rows8` names
_GROUPS: tuple[ProductMode, ...] = (Int8GroupsMode(), Fp8GroupsMode())
MANY_ROWS8 = {mode.coding: mode for mode in _GROUPS}  # by what `CodeGroups.many_rows8` names


def mode_of(codes: CodeGroups | None, x_type: str, w_type: str, level: int, experts: bool) -> ProductMode:
    """How operands meet on a GPU of that compute capability, 0 for HIP. codes: of W, None where it is dense."""
    eight = ROWS8.get(codes.rows8(level)) if codes else None
    if eight and not (eight.exact and experts):  # whose rows nobody has smoothed
        return eight
    narrow = x_type in ("bf16", "f16")
    if codes:
        if narrow and codes.fits_matrix_units:
            return CODES_MODE
        return BLOCKS_MODE if narrow and codes.as_values else WIDE_MODE
    return DENSE_MODE if narrow and w_type == x_type else WIDE_MODE


def many_mode_of(codes: CodeGroups | None, level: int, experts: bool) -> ProductMode | None:
    """How operands may meet instead where there are many rows; None for no other way."""
    found = MANY_ROWS8.get(codes.many_rows8(level)) if codes else None
    return None if found and found.exact and experts else found  # as `mode_of` has it
