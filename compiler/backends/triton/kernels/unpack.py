"""The kernel before a product of many rows that unpacks its codes once, to a matrix of 16 bits or of 8-bit floats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from .....runtime.format.plan import Extent
from ....program.layout import Layout, Stored
from ....weights.formats.float8 import Float8
from ...render import render
from ..layouts.float8 import Float8Rows
from ..layouts.registry import LAYOUTS
from ..spec import ELEMENTS, ONE, LaunchSpec, scratch_arg
from ..tiling.machine import LinearTiling
from .product import TEMPLATES, WeightProduct

W = TypeVar("W", bound=WeightProduct[Any])
_VALUES = (16, 256)  # rows and columns of a program of linear/unpack.py.jinja
_BYTES_ROWS = 64  # rows of a program of linear/unpack_bytes.py.jinja, which unpacks one group of each
MATRIX = "matrix"  # the scratch area


@dataclass(frozen=True)
class UnpackSource:
    """A matrix of codes [n, k] whose values are stored in 16 bits, as a table of n rows."""

    op: WeightProduct[Any]

    @property
    def macros(self) -> str:
        """The template that says how codes are read."""
        assert self.op.codes is not None
        return self.op.codes.macros

    @property
    def layout(self) -> Layout:
        """The layout of the matrix."""
        return self.op.layout

    @property
    def rows(self) -> int:
        """Rows of which a program unpacks one group to bytes."""
        return _BYTES_ROWS

    @property
    def bytes_layout(self) -> Float8Rows:
        """The layout of W as 8-bit floats."""
        found = LAYOUTS.of(_bytes_stored(self.op))
        assert isinstance(found, Float8Rows)
        return found

    @property
    def by_groups(self) -> bool:
        """Whether the values of a group are unpacked together: the columns of a program are whole groups."""
        return self.op.codes is not None and self.op.codes.as_values and _VALUES[1] % self.op.codes.group == 0

    @property
    def table(self) -> dict[str, int]:
        """The facts of the matrix that the layouts' macros need of a table."""
        return {"table_rows": self.op.step.n, "n": self.op.step.k}


def unpack(op: WeightProduct[Any], tile: LinearTiling) -> LaunchSpec:
    """The launch that writes W to scratch, in 16 bits or, with `tile.eight`, as 8-bit floats."""
    file, kind = ("unpack_bytes", "*u8") if tile.eight else ("unpack", f"*{ELEMENTS[op.x.dtype]}")
    source = render(f"{TEMPLATES}/{file}.py.jinja", UnpackSource(op), op.step)
    args = (replace(op.operand_args["w_ptr"], name="x_ptr"), scratch_arg(MATRIX, kind))
    rows, columns = (_BYTES_ROWS, op.layout.format.block[1]) if tile.eight else _VALUES
    grid = (Extent(-(-op.step.n // rows)), Extent(-(-op.step.k // columns)), ONE)
    return LaunchSpec(source, "linear_unpack", args, grid, num_warps=4, num_stages=1)


def unpacked(op: W, tile: LinearTiling) -> W:
    """The product with the W that `unpack` writes; the caller must still replace its argument w_ptr."""
    kind, step = op.x.dtype, op.step
    stored = _bytes_stored(op) if tile.eight else msgspec.structs.replace(step.stored, format=kind)
    w = step.w if tile.eight else msgspec.structs.replace(step.w, dtype=kind)
    return replace(op, step=msgspec.structs.replace(step, stored=stored, w=w))


def read_unpacked(spec: LaunchSpec) -> LaunchSpec:
    """A launch of the product that reads W from scratch."""
    matrix = scratch_arg(MATRIX).value
    return replace(spec, args=tuple(replace(a, value=matrix) if a.name == "w_ptr" else a for a in spec.args))


def unpacked_scratch(op: WeightProduct[Any], tile: LinearTiling) -> dict[str, int]:
    """Bytes of the unpacked matrix."""
    n, k = op.step.n, op.step.k
    return {MATRIX: LAYOUTS.of(_bytes_stored(op)).matrix_nbytes(n, k) if tile.eight else 2 * n * k}


def _bytes_stored(op: WeightProduct[Any]) -> Stored:
    """How W is stored as 8-bit floats, with the groups of its codes."""
    assert op.codes is not None
    return Stored(Float8(op.codes.group).name, "product")
