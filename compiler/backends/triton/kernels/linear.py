"""Matrix products with a weight: dense or quantized, of every row or of the rows sent to each expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec

from .....runtime.format.manifest import Limits
from .....runtime.format.operands import Operand
from .....runtime.format.plan import CountersArg, Extent, OperandArg, ScratchArg, Term, extent
from ....program.steps import linear as steps
from ...render import render
from ..bounds.forms import Number
from ..layouts.registry import LAYOUTS
from ..spec import ELEMENTS, ONE, Arg, LaunchSpec, Shape, TritonKernel, batch_arg
from ..tiling.choice import Tuner
from ..tiling.linear import LinearTilings, of_class, pick
from ..tiling.machine import LinearTiling
from ..tiling.product import ProductFacts, ProductMode
from ..tiling.whole import StageProduct, same_bits
from .epilogue import epilogue_operands
from .linear_around import UNPACKED_ROWS, RowsSource, SortSource, UnpackSource
from .linear_source import ProductSource
from .product import P, WeightProduct

LOGIT_ROWS = 64  # beyond decoding, seldom more rows than this are wanted
_NORMED = 1  # rows that the program of a product that ends last normalizes; more are shared out by a kernel
_HELD = 64  # elements of a row per thread then
# the operands of a norm, as those of the product before it
_NORM = {"x": "y", "r": "norm_in.r", "w": "norm_in.w", "bias": "norm_in.bias", "y": "norm_out.y", "sum": "norm_out.sum",
         "coded.codes": "norm_out.codes", "coded.scales": "norm_out.scales"}  # fmt: skip


@dataclass(frozen=True)
class ProductKernel(WeightProduct[P]):
    """y = finish(x W^T + bias), for rows that all have one matrix, or that are sent to some of several."""

    template: ClassVar[str] = "triton/linear"

    def _codes_rows(self, tile: LinearTiling, shape: Shape, mode: ProductMode) -> bool:
        """Whether a kernel brings rows to 8 bits first."""
        return mode.eight and not self.coded and not mode.inline(bool(tile.decode), shape.max_tokens)

    def staged(self) -> TritonKernel:
        return replace(self, ahead=True)

    def stage_product(self, shape: Shape, tuner: Tuner) -> StageProduct | None:
        tile = self._tile(shape, tuner)
        if not tile.decode:
            return None
        facts = self.product(shape.tiled_tokens, tuner.target.level)
        known, (_, launched) = of_class(facts), tuner.taken[-1]
        out = [refused.config for refused in tuner.refused if refused.key == known.key]
        candidates = [c for c in LinearTilings(tuner.target).candidates(known) if c not in out]
        asks = bool(ProductSource(replace(self, ahead=True), tile, (), tuner.target.level).asks)
        return StageProduct(facts, known.key, launched, same_bits(launched, candidates), asks)

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        launches = self._products(shape, tuner)
        if self.norm is None or any(arg.name == "norm_y_ptr" for arg in launches[-1].args):
            return launches
        return (*launches, *map(_behind, self.norm.launches(shape, limits, tuner)))

    def _products(self, shape: Shape, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        tile = self._tile(shape, tuner)
        mode = self.tiled_mode(tuner.target.level, tile)
        if tile.unpacked:
            return (self._unpack(tile), *self._unpacked_launches(tile, tuner, shape))
        first = (self._rows(mode),) if self._codes_rows(tile, shape, mode) else ()
        if tile.decode:
            return (*first, self._decode(tile, tuner, shape))
        sort = self._sort(tile, shape) if self.experts else ()
        return (*first, *sort, *self._many(tile, tuner, shape))

    def scratch(self, shape: Shape, limits: Limits, tuner: Tuner) -> dict[str, int]:
        tile = self._tile(shape, tuner)
        areas = {}
        mode = self.tiled_mode(tuner.target.level, tile)
        if self._codes_rows(tile, shape, mode):
            rows = shape.max_tokens * (self.topk if self.x_per_slot else 1)
            areas |= {"codes": rows * self.step.k, "scales": 4 * rows * mode.scale_words(self.step.k)}
        if tile.splits > 1:
            parts, tiles = len(epilogue_operands(self.step).parts), self._tiles(tile, shape)
            values = tiles * tile.m * tile.n if tile.merges(tiles) else shape.max_tokens * self.step.columns
            areas["sums"] = 4 * tile.splits * parts * values
        if tile.unpacked:
            n, k = self.step.n, self.step.k
            areas["matrix"] = LAYOUTS.of(self.bytes_stored).matrix_nbytes(n, k) if tile.eight else 2 * n * k
        if self.experts and not tile.decode:
            blocks = self._blocks(tile.m).value({self.num_rows: shape.max_tokens})
            areas |= {"counts": 4 * (self.experts + 1), "slots": 4 * blocks * tile.m, "experts": 4 * blocks}
        return areas

    def scratch_values(self, sizes: Mapping[str, Number]) -> dict[str, tuple[Number, Number]]:
        slots = sizes[self.num_rows] * self.topk
        return {"slots": (-1, slots - 1), "counts": (0, slots), "experts": (-1, self.experts)} if self.experts else {}

    def _tile(self, shape: Shape, tuner: Tuner) -> LinearTiling:
        rows = shape.tiled_tokens
        if shape.typical and self.codes:
            rows = min(rows, 64)  # of codes fewer: decodes would wait for the matrix units
        if self.step.rows == "logit_rows" and not shape.decode:
            rows = min(rows, LOGIT_ROWS)
        return LinearTiling.of(pick(self.product(rows, tuner.target.level), tuner))

    def product(self, rows: int, level: int) -> ProductFacts:
        """The facts that its tiling for that many rows depends on."""
        operands, s = epilogue_operands(self.step), self.step
        return ProductFacts(
            self.mode(level), self.x.dtype, s.n, s.k, s.columns, len(operands.parts), operands.beside, rows,
            self.codes.unpacking if self.codes else None, self.experts, self.topk, self.coded, self.many_mode(level),
        )  # fmt: skip

    def _unpack(self, tile: LinearTiling) -> LaunchSpec:
        """W in 16 bits or as 8-bit floats, in scratch."""
        file = "unpack_bytes" if tile.eight else "unpack"
        source = render(f"{self.template}/{file}.py.jinja", UnpackSource(self), self.step)
        kind = "*u8" if tile.eight else f"*{ELEMENTS[self.x.dtype]}"
        args = (replace(self._args()["w_ptr"], name="x_ptr"), _scratch("matrix", kind))
        rows, columns = (UNPACKED_ROWS, self.layout.format.block[1]) if tile.eight else (16, 256)
        grid = (Extent(-(-self.step.n // rows)), Extent(-(-self.step.k // columns)), ONE)
        return LaunchSpec(source, "linear_unpack", args, grid, num_warps=4, num_stages=1)

    def _unpacked_launches(self, tile: LinearTiling, tuner: Tuner, shape: Shape) -> tuple[LaunchSpec, ...]:
        """What launches the product with W as `_unpack` leaves it."""
        kind, step = self.x.dtype, self.step
        stored = self.bytes_stored if tile.eight else msgspec.structs.replace(step.stored, format=kind)
        w = step.w if tile.eight else _typed(step.w, kind)
        other = replace(self, step=msgspec.structs.replace(step, stored=stored, w=w))
        mode = other.mode(tuner.target.level)
        first = (other._rows(mode),) if other._codes_rows(tile, shape, mode) else ()
        matrix = _scratch("matrix").value
        many = (
            replace(spec, args=tuple(replace(a, value=matrix) if a.name == "w_ptr" else a for a in spec.args))
            for spec in other._many(tile, tuner, shape)
        )
        return (*first, *many)

    def _args(self) -> dict[str, Arg]:
        """All operands by their names in the source."""
        extras = {f"extras.{i}": f"e{i}_ptr" for i in range(len(self.step.extras))}
        number = len(self.step.low) if isinstance(self.step, steps.RowProduct) else 0
        change = {f"{name}.{i}": f"{name}{i}_ptr" for i in range(number) for name in ("low", "up", "shift")}
        names = {**extras, **change, "slot": "slot_ptr"}
        args = self.pointers(x="x_ptr", w="w_ptr", bias="b_ptr", index="index_ptr", **names, y="y_ptr")
        return {arg.name: arg for arg in args}

    def _spec(
        self, name: str, tile: LinearTiling, tuner: Tuner, args: Sequence[Arg], grid: tuple[Extent, Extent, Extent]
    ) -> LaunchSpec:
        source = ProductSource(self, tile, tuple(args), tuner.target.level)
        file, entry = f"{self.template}/{name}.py.jinja", f"linear_{name.split('_')[0]}"
        return LaunchSpec(render(file, source, self.step), entry, tuple(args), grid, tile.warps, tile.stages)

    def _decode(self, tile: LinearTiling, tuner: Tuner, shape: Shape) -> LaunchSpec:
        mode = self.mode(tuner.target.level)
        inline = not self.coded and mode.inline(bool(tile.decode), shape.max_tokens)
        args = [*self._read_args(None if inline else mode).values(), *self._padding(shape)]
        columns, name = Extent(-(-self.step.columns // tile.n)), mode.decode_template
        if self.experts:
            return self._spec(name, tile, tuner, args, (columns, self._slots, ONE))
        if len(more := self._counted(tile, shape)) > 1:
            args += more
        return self._spec(name, tile, tuner, [*args, self.count], (columns, ONE, ONE))

    def _rows(self, mode: ProductMode) -> LaunchSpec:
        """x in 8 bits, in scratch."""
        source = RowsSource(self, mode)
        text = render(f"{self.template}/{mode.rows_template}.py.jinja", source, self.step)
        args = (self._args()["x_ptr"], *_row_scratch(mode), self.count)
        rows = self._slots if self.x_per_slot else extent(self.num_rows)
        return LaunchSpec(text, "linear_rows", args, (rows, ONE, ONE), num_warps=source.warps)

    def _read_args(self, mode: ProductMode | None) -> dict[str, Arg]:
        """All operands, with what `_rows` leaves in place of x."""
        args = self._args()
        if mode is None or not mode.eight:
            return args
        given = self.pointers(**{"x_coded.codes": "codes_ptr", "x_coded.scales": "scales_ptr"})
        return {arg.name: arg for arg in (*(given or _row_scratch(mode)), *args.values()) if arg.name != "x_ptr"}

    def _tiles(self, tile: LinearTiling, shape: Shape) -> int:
        """How many tiles the output has, at most."""
        return -(-self.step.columns // tile.n) * -(-shape.max_tokens // tile.m)

    def _many(self, tile: LinearTiling, tuner: Tuner, shape: Shape) -> tuple[LaunchSpec, ...]:
        mode = self.tiled_mode(tuner.target.level, tile)
        args = self._read_args(mode)
        args.pop("index_ptr", None)
        merges = tile.merges(self._tiles(tile, shape))
        if tile.splits > 1:
            read = ("x_ptr", "codes_ptr", "scales_ptr", "w_ptr")
            args = {name: arg for name, arg in args.items() if merges or name in read}
            args["sums_ptr"] = _scratch("sums", "*fp32")
        if self.experts:
            args |= {"slots_ptr": _scratch("slots"), "experts_ptr": _scratch("experts")}
        columns = -(-self.step.columns // tile.n)
        blocks = self._blocks(tile.m) if self.experts else extent(self.num_rows, tile.m)
        tiles = Extent(
            blocks.constant * columns, tuple(Term(t.size, t.divide, t.times * columns) for t in blocks.terms)
        )
        more = self._counted(tile, shape) if merges else []
        grid = (tiles, Extent(tile.splits), ONE)
        many = self._spec(mode.tile_template, tile, tuner, [*args.values(), *more, self.count], grid)
        return (many,) if merges or tile.splits == 1 else (many, *self._reduce(tile, tuner))

    def _counted(self, tile: LinearTiling, shape: Shape) -> list[Arg]:
        """What a program takes that finds out whether it ends last: operands of a norm, and counters."""
        found: list[Arg] = []
        if self.norm and shape.max_tokens <= _NORMED and self.norm.block <= _HELD * 32 * tile.warps:
            found += self.pointers(**{name: f"norm_{name.split('.')[1]}_ptr" for name in _NORM.values() if name != "y"})
        return [*found, Arg("counters_ptr", "*i32", CountersArg())]

    def _reduce(self, tile: LinearTiling, tuner: Tuner) -> tuple[LaunchSpec]:
        args = [arg for name, arg in self._args().items() if name not in ("x_ptr", "w_ptr")]
        grid = (extent(self.num_rows), Extent(-(-self.step.columns // 512)), ONE)
        spec = self._spec("reduce", tile, tuner, [*args, _scratch("sums", "*fp32"), self.count], grid)
        return (LaunchSpec(spec.source, spec.entry, spec.args, spec.grid, num_warps=4, num_stages=1),)

    # -- experts ------------------------------------------------------------------------------------------------------

    @property
    def _slots(self) -> Extent:
        return extent(self.num_rows, times=self.topk)

    def _blocks(self, block: int) -> Extent:
        """At most how many blocks of one expert's rows there are; see `most_blocks`."""
        return extent(self.num_rows, block, self.topk, self.experts + 1)

    def _padding(self, shape: Shape) -> tuple[Arg, ...]:
        """What tells which rows only fill a graph: of steps of one token per sequence, the context lengths."""
        return (batch_arg("context_lens"),) if self.experts and shape.decode and self.step.rows == "tokens" else ()

    def _sort(self, tile: LinearTiling, shape: Shape) -> tuple[LaunchSpec, LaunchSpec]:
        """Two kernels that put the slots in the order of their experts."""
        padding = self._padding(shape)
        source = render(f"{self.template}/expert_sort.py.jinja", SortSource(self, tile.m, bool(padding)), self.step)
        grid = (Extent(self.experts + 1), ONE, ONE)
        index = tuple(arg for name, arg in self._args().items() if name == "index_ptr")
        given, counts = (*index, *padding), _scratch("counts")
        place = (*given, counts, _scratch("slots"), _scratch("experts"), self.count)
        return (
            LaunchSpec(source, "expert_count", (*given, counts, self.count), grid, num_warps=4),
            LaunchSpec(source, "expert_place", place, grid, num_warps=4),
        )


@dataclass(frozen=True)
class LinearKernel(ProductKernel[steps.RowProduct]):
    """All rows with one matrix."""


@dataclass(frozen=True)
class ExpertLinearKernel(ProductKernel[steps.ExpertProduct]):
    """Each row with the matrices of the experts it was sent to: y is [rows, topk, columns]."""

    @property
    def experts(self) -> int:
        return self.step.experts

    @property
    def topk(self) -> int:
        return self.step.topk

    @property
    def x_per_slot(self) -> bool:
        return self.step.x_per_slot


def _behind(spec: LaunchSpec) -> LaunchSpec:
    """The launch of a norm with operands of the product before it."""
    args = (replace(a, value=OperandArg(_NORM[a.value.name])) for a in spec.args if isinstance(a.value, OperandArg))
    return replace(spec, args=tuple(args))


def _typed(operand: Operand, kind: str) -> Operand:
    """An operand of another element type."""
    return msgspec.structs.replace(operand, dtype=kind)


def _row_scratch(mode: ProductMode) -> tuple[Arg, Arg]:
    return _scratch("codes", mode.codes_type), _scratch("scales", mode.scales_type)


def _scratch(name: str, kind: str = "*i32") -> Arg:
    return Arg(f"{name}_ptr", kind, ScratchArg(name))
