"""Matrix products with a weight: dense or quantized, of every row or of the rows sent to each expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .....runtime.format.manifest import Limits
from .....runtime.format.plan import CountersArg, Extent, OperandArg, Term, extent
from ....program.steps import linear as steps
from ...render import render
from ..bounds.forms import Number
from ..spec import ONE, Arg, LaunchSpec, Shape, TritonKernel, batch_arg, scratch_arg
from ..tiling.choice import Tuner
from ..tiling.linear import LinearTilings, of_class, pick
from ..tiling.machine import LinearTiling
from ..tiling.product import ProductFacts, ProductMode
from ..tiling.whole import StageProduct, same_bits
from .epilogue import epilogue_operands
from .expert_sort import sort_scratch, sort_slots, sort_values, sorted_args
from .product import TEMPLATES, P, WeightProduct
from .product_source import ProductSource
from .quantize_rows import quantize_rows, quantized_args, quantized_scratch
from .unpack import read_unpacked, unpack, unpacked, unpacked_scratch

LOGIT_ROWS = 64  # mixed steps seldom need logits of more rows than this
_NORMED = 1  # most rows that the product's last program normalizes; for more there is a separate kernel
_HELD = 64  # elements of a row per thread in that case
# the operands of a norm, by the names that the product before it gives them
_NORM = {"x": "y", "r": "norm_in.r", "w": "norm_in.w", "bias": "norm_in.bias", "y": "norm_out.y", "sum": "norm_out.sum",
         "coded.codes": "norm_out.codes", "coded.scales": "norm_out.scales"}  # fmt: skip


@dataclass(frozen=True)
class ProductKernel(WeightProduct[P]):
    """y = finish(x W^T + bias), for rows that share one matrix, or that are sent to some of several."""

    def _codes_rows(self, tile: LinearTiling, shape: Shape, mode: ProductMode) -> bool:
        """Whether a kernel before the product quantizes rows to 8 bits."""
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
            return self._unpacked_launches(tile, tuner, shape)
        first = (quantize_rows(self, mode),) if self._codes_rows(tile, shape, mode) else ()
        if tile.decode:
            return (*first, self._decode(tile, tuner, shape))
        sort = sort_slots(self, tile.m, self._padding(shape)) if self.experts else ()
        return (*first, *sort, *self._many(tile, tuner, shape))

    def scratch(self, shape: Shape, limits: Limits, tuner: Tuner) -> dict[str, int]:
        tile = self._tile(shape, tuner)
        areas = {}
        mode = self.tiled_mode(tuner.target.level, tile)
        if self._codes_rows(tile, shape, mode):
            areas |= quantized_scratch(self, mode, shape.max_tokens)
        if tile.splits > 1:
            parts, tiles = len(epilogue_operands(self.step).parts), self._tiles(tile, shape)
            values = tiles * tile.m * tile.n if tile.merges(tiles) else shape.max_tokens * self.step.columns
            areas["sums"] = 4 * tile.splits * parts * values
        if tile.unpacked:
            areas |= unpacked_scratch(self, tile)
        if self.experts and not tile.decode:
            areas |= sort_scratch(self, tile.m, shape.max_tokens)
        return areas

    def scratch_values(self, sizes: Mapping[str, Number]) -> dict[str, tuple[Number, Number]]:
        return sort_values(self, sizes) if self.experts else {}

    def _tile(self, shape: Shape, tuner: Tuner) -> LinearTiling:
        rows = shape.tiled_tokens
        if shape.typical and self.codes:
            rows = min(rows, 64)  # fewer for codes: decodes would wait for the matrix units
        if self.step.rows == "logit_rows" and not shape.decode:
            rows = min(rows, LOGIT_ROWS)
        return LinearTiling.of(pick(self.product(rows, tuner.target.level), tuner))

    def product(self, rows: int, level: int) -> ProductFacts:
        """The facts that the product's tiling for that many rows depends on."""
        operands, s = epilogue_operands(self.step), self.step
        return ProductFacts(
            self.mode(level), self.x.dtype, s.n, s.k, s.columns, len(operands.parts), operands.beside, rows,
            self.codes.unpacking if self.codes else None, self.experts, self.topk, self.coded, self.many_mode(level),
        )  # fmt: skip

    def _unpacked_launches(self, tile: LinearTiling, tuner: Tuner, shape: Shape) -> tuple[LaunchSpec, ...]:
        """The launches that unpack W to scratch and multiply with it there."""
        other = unpacked(self, tile)
        mode = other.mode(tuner.target.level)
        first = (quantize_rows(other, mode),) if other._codes_rows(tile, shape, mode) else ()
        return (unpack(self, tile), *first, *map(read_unpacked, other._many(tile, tuner, shape)))

    def _spec(
        self, name: str, tile: LinearTiling, tuner: Tuner, args: Sequence[Arg], grid: tuple[Extent, Extent, Extent]
    ) -> LaunchSpec:
        source = ProductSource(self, tile, tuple(args), tuner.target.level, tuner.target.subnormals)
        file, entry = f"{TEMPLATES}/{name}.py.jinja", f"linear_{name.split('_')[0]}"
        return LaunchSpec(render(file, source, self.step), entry, tuple(args), grid, tile.warps, tile.stages)

    def _decode(self, tile: LinearTiling, tuner: Tuner, shape: Shape) -> LaunchSpec:
        mode = self.mode(tuner.target.level)
        inline = not self.coded and mode.inline(bool(tile.decode), shape.max_tokens)
        args = [*self._read_args(None if inline else mode).values(), *self._padding(shape)]
        columns, name = Extent(-(-self.step.columns // tile.n)), mode.decode_template
        if self.experts:
            return self._spec(name, tile, tuner, args, (columns, self.slots, ONE))
        if len(more := self._counted(tile, shape)) > 1:
            args += more
        return self._spec(name, tile, tuner, [*args, self.count], (columns, ONE, ONE))

    def _read_args(self, mode: ProductMode | None) -> dict[str, Arg]:
        """All operands, with the output of `quantize_rows` in place of x."""
        args = self.operand_args
        if mode is None or not mode.eight:
            return args
        given = self.pointers(**{"x_coded.codes": "codes_ptr", "x_coded.scales": "scales_ptr"})
        return {arg.name: arg for arg in (*(given or quantized_args(mode)), *args.values()) if arg.name != "x_ptr"}

    def _tiles(self, tile: LinearTiling, shape: Shape) -> int:
        """The most tiles of the output."""
        return -(-self.step.columns // tile.n) * -(-shape.max_tokens // tile.m)

    def _many(self, tile: LinearTiling, tuner: Tuner, shape: Shape) -> tuple[LaunchSpec, ...]:
        mode = self.tiled_mode(tuner.target.level, tile)
        args = self._read_args(mode)
        args.pop("index_ptr", None)
        merges = tile.merges(self._tiles(tile, shape))
        if tile.splits > 1:
            read = ("x_ptr", "codes_ptr", "scales_ptr", "w_ptr")
            args = {name: arg for name, arg in args.items() if merges or name in read}
            args["sums_ptr"] = scratch_arg("sums", "*fp32")
        if self.experts:
            args |= sorted_args()
        columns = -(-self.step.columns // tile.n)
        blocks = self.blocks(tile.m) if self.experts else extent(self.num_rows, tile.m)
        tiles = Extent(
            blocks.constant * columns, tuple(Term(t.size, t.divide, t.times * columns) for t in blocks.terms)
        )
        more = self._counted(tile, shape) if merges else []
        grid = (tiles, Extent(tile.splits), ONE)
        many = self._spec(mode.tile_template, tile, tuner, [*args.values(), *more, self.count], grid)
        return (many,) if merges or tile.splits == 1 else (many, *self._reduce(tile, tuner))

    def _counted(self, tile: LinearTiling, shape: Shape) -> list[Arg]:
        """The arguments of a program that finds out whether it ends last: operands of a norm, and counters."""
        found: list[Arg] = []
        if self.norm and shape.max_tokens <= _NORMED and self.norm.block <= _HELD * 32 * tile.warps:
            found += self.pointers(**{name: f"norm_{name.split('.')[1]}_ptr" for name in _NORM.values() if name != "y"})
        return [*found, Arg("counters_ptr", "*i32", CountersArg())]

    def _reduce(self, tile: LinearTiling, tuner: Tuner) -> tuple[LaunchSpec]:
        args = [arg for name, arg in self.operand_args.items() if name not in ("x_ptr", "w_ptr")]
        grid = (extent(self.num_rows), Extent(-(-self.step.columns // 512)), ONE)
        spec = self._spec("reduce", tile, tuner, [*args, scratch_arg("sums", "*fp32"), self.count], grid)
        return (LaunchSpec(spec.source, spec.entry, spec.args, spec.grid, num_warps=4, num_stages=1),)

    def _padding(self, shape: Shape) -> tuple[Arg, ...]:
        """The argument that tells which rows only fill a graph: the context lengths, in steps of one token per
        sequence."""
        return (batch_arg("context_lens"),) if self.experts and shape.decode and self.step.rows == "tokens" else ()


@dataclass(frozen=True)
class LinearKernel(ProductKernel[steps.RowProduct]):
    """A product of all rows with one matrix."""


@dataclass(frozen=True)
class ExpertLinearKernel(ProductKernel[steps.ExpertProduct]):
    """A product of each row with the matrices of the experts it was sent to: y is [rows, topk, columns]."""

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
