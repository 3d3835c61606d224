"""Generated elementwise kernels: any body over operands that broadcast to one shape per row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from .....runtime.format.manifest import Limits
from .....runtime.format.plan import Extent, extent
from ...errors import CodegenError
from ...render import render
from ..spec import ELEMENTS, Arg, LaunchSpec, Shape, TritonKernel
from ..tiling.choice import Tuner
from .body import Value, translate
from .lines import BLOCK, even_block, warps

KINDS = {"f32": "f", "bf16": "f", "f16": "f", "i32": "i", "bool": "b"}


@dataclass(frozen=True)
class Access:
    """One operand: the program's view of its type, the stride between rows, and one stride per dim."""

    dtype: str
    row_stride: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """An operand in the rendered source: pointer, address and mask expressions, and what is read into or written."""

    pointer: str
    address: str
    mask: str
    value: str


@dataclass(frozen=True, kw_only=True)
class Pointwise(TritonKernel):
    """y = body(inputs) over `shape` per row.

    inputs: "dtype:row_stride:stride,stride,..." with stride 0 where an operand is broadcast, and row stride 0 where it
    is the same in all rows. outputs: the same with the register before it.
    """

    template: ClassVar[str] = "triton/pointwise.py.jinja"
    entry: ClassVar[str] = "pointwise"
    shape: Sequence[int]
    inputs: Sequence[str]  # type: ignore[assignment, misc]
    body: Sequence[str]
    outputs: Sequence[str]

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        """All operands as the params say, inputs first."""
        texts = [*self.inputs, *(text.split(":", 1)[1] for text in self.outputs)]
        return tuple(_access(text, len(self.shape)) for text in texts)

    @cached_property
    def merged(self) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Sizes of the merged dims, and every operand's strides over them."""
        return merge(self.shape, [a.strides for a in self.accesses])

    @property
    def dims(self) -> tuple[int, ...]:
        return self.merged[0]

    @property
    def cols(self) -> int:
        return math.prod(self.dims)

    @property
    def block_cols(self) -> int:
        """Columns per program."""
        return even_block(self.cols)

    @property
    def block_rows(self) -> int:
        return BLOCK // self.block_cols

    @property
    def partial(self) -> bool:
        """Whether a program's columns may lie outside."""
        return self.cols % self.block_cols != 0

    @property
    def names(self) -> list[str]:
        """The pointers."""
        ins = len(self.inputs)
        return [f"a{i}_ptr" if i < ins else f"y{i - ins}_ptr" for i in range(len(self.accesses))]

    @cached_property
    def _translated(self) -> tuple[list[str], dict[str, Value]]:
        names = {f"a{i}": f"a{i}" for i in range(len(self.inputs))}
        kinds = {f"a{i}": KINDS[a.dtype] for i, a in enumerate(self.accesses[: len(self.inputs)])}
        return translate(self.body, names, kinds)

    @property
    def lines(self) -> list[str]:
        """The chain."""
        return self._translated[0]

    @property
    def read(self) -> list[Place]:
        """What is loaded, each into the variable a<i>."""
        convert = {"f": ".to(tl.float32)", "i": "", "b": " != 0"}
        return [self._place(i, convert[KINDS[self.accesses[i].dtype]]) for i in range(len(self.inputs))]

    @property
    def written(self) -> list[Place]:
        """What is stored."""
        found = []
        for i, text in enumerate(self.outputs):
            register, dtype, *_ = text.split(":")
            value, kind = self._translated[1][register], KINDS[dtype]
            kept = value.mask if kind == "b" else value.to(kind).text
            found.append(self._place(len(self.inputs) + i, kept))
        return found

    def _place(self, i: int, value: str) -> Place:
        access, strides = self.accesses[i], self.merged[1][i]
        pointer, offset = self.names[i], column_offset(self.dims, strides)
        by_row = i >= len(self.inputs) or access.row_stride != 0
        rows = f" + row * {access.row_stride}" if by_row else ""
        if (
            not rows and not offset
        ):  # a block all the same: Triton's interpreter broadcasts scalar comparisons to floats
            offset = "tl.zeros([1, 1], tl.int32)"
            return Place(pointer, f"{pointer} + {offset}", "", value)
        masks = ["in_rows"] * (by_row and self.block_rows > 1) + ["in_cols"] * (bool(offset) and self.partial)
        mask = f", mask={' & '.join(masks)}" if masks else ""
        return Place(pointer, f"{pointer}{rows}{' + ' if offset else ''}{offset}", mask, value)

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        args = []
        for i, (name, kind, aligned) in enumerate(zip(self.names, self.types, self.aligned, strict=True)):
            j = i - len(self.inputs)
            args.append(Arg(name, "*" + ELEMENTS[kind], f"input:{i}" if j < 0 else f"output:{j}", aligned))
        grid = (extent(self.num_rows, self.block_rows), Extent(-(-self.cols // self.block_cols)), Extent(1))
        source = render(self.template, self)
        args.append(Arg("num_rows", "i32", self.num_rows, aligned=False))
        return (LaunchSpec(source, self.entry, tuple(args), grid, num_warps=warps(BLOCK, tuner.target)),)


def _access(text: str, rank: int) -> Access:
    dtype, row_stride, strides = text.split(":")
    access = Access(dtype, int(row_stride), tuple(int(s) for s in strides.split(",") if s))
    if dtype not in KINDS or len(access.strides) != rank:
        raise CodegenError(f"pointwise kernel: operand {text!r} does not fit a shape of {rank} dims")
    return access


def merge(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Sizes and strides without dims of size 1, neighbours joined that every operand walks with one stride."""
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for d, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(k[-1] == s[d] * size for k, s in zip(kept, strides, strict=True)):
            sizes[-1] *= size
            for k, s in zip(kept, strides, strict=True):
                k[-1] = s[d]
        else:
            sizes.append(size)
            for k, s in zip(kept, strides, strict=True):
                k.append(s[d])
    return (tuple(sizes) or (1,)), tuple(tuple(k) or (0,) for k in kept)


def column_offset(dims: Sequence[int], strides: Sequence[int]) -> str:
    """Where column `at` (of all merged dims) lies in an operand; "" for one that is the same in all columns."""
    terms: list[str] = []
    below = 1
    for d in range(len(dims) - 1, -1, -1):
        if strides[d]:
            index = f"at // {below}" if below > 1 else "at"
            index += f" % {dims[d]}" if d else ""
            terms.append(index + (f" * {strides[d]}" if strides[d] != 1 else ""))
        below *= dims[d]
    return " + ".join(reversed(terms))
