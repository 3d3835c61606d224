"""Matrix products with a weight: dense or quantized, of every row or of the rows sent to each expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .....runtime.format.access import Access, Columns
from .....runtime.format.manifest import Limits
from .....runtime.format.plan import Extent, Term, extent
from ....ops.body import Body
from ...errors import CodegenError
from ...render import render
from ..spec import ONE, Arg, LaunchSpec, Shape, TritonKernel
from ..tiling.choice import Tuner
from ..tiling.linear import Product, pick
from .linear_source import SortSource, Source, Tiling, epilogue_operands

LOGIT_ROWS = 64  # beyond decoding, seldom more rows than this are wanted


@dataclass(frozen=True, kw_only=True)
class Linear(TritonKernel):
    """y = finish(x W^T + bias); operands x, W, bias, *extras -> y. W is dense ("format") or codes ("bits", "group").

    epilogue: what becomes of the product, over epilogue_inputs: columns of it, or how the next extra operand is walked,
    over the columns of y. width: these columns.
    """

    template: ClassVar[str] = "triton/linear"
    operands: ClassVar[int] = 3
    k: int
    n: int
    format: str = ""
    bits: int = 0
    group: int = 0
    x_stride: int = -1
    y_stride: int = -1
    has_bias: bool = False
    epilogue: Body | None = None
    epilogue_inputs: Sequence[Columns | Access] = ()
    width: int = 0
    experts: int = 0
    topk: int = 1
    x_per_slot: bool = False

    def __post_init__(self) -> None:
        if self.x_stride < 0:
            object.__setattr__(self, "x_stride", self.k * (self.topk if self.x_per_slot else 1))
        if self.y_stride < 0:
            object.__setattr__(self, "y_stride", self.columns * self.topk)
        if self.bits and self.n * self.k * self.bits // 16 >= 2**31:
            raise CodegenError(f"product: {self.n} x {self.k} codes of {self.bits} bits need 64-bit addresses")

    @property
    def inputs(self) -> int:  # type: ignore[override]
        return len(self.types) - 1

    @property
    def columns(self) -> int:
        """Columns of y."""
        return self.width or self.n

    @property
    def span(self) -> int:
        """Elements of 16 bits that hold the codes of one row's group."""
        return self.group * self.bits // 16

    @property
    def mode(self) -> str:
        """How operands meet: "dense" and "codes" in 16 bits on matrix units, "wide" in float32."""
        narrow = self.types[0] in ("bf16", "f16")
        if self.bits:
            return "codes" if narrow and self.span >= 16 and self.span & (self.span - 1) == 0 else "wide"
        return "dense" if narrow and self.types[1] == self.types[0] else "wide"

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        tile = self._tile(shape, tuner)
        if tile.decode:
            return (self._decode(tile, tuner),)
        first = self._sort(tile) if self.experts else ()
        last = self._reduce(tile, tuner) if tile.splits > 1 else ()
        return (*first, self._many(tile, tuner), *last)

    def scratch(self, shape: Shape, limits: Limits, tuner: Tuner) -> dict[str, int]:
        tile = self._tile(shape, tuner)
        areas = {}
        if tile.splits > 1:
            parts = len(epilogue_operands(self).parts)
            areas["sums"] = 4 * tile.splits * parts * shape.max_tokens * self.columns
        if self.experts and not tile.decode:
            blocks = self._blocks(tile.m).value({self.num_rows: shape.max_tokens})
            areas |= {"counts": 4 * (self.experts + 1), "slots": 4 * blocks * tile.m, "experts": 4 * blocks}
        return areas

    def _tile(self, shape: Shape, tuner: Tuner) -> Tiling:
        rows = shape.tiled_tokens
        if shape.typical and self.bits:
            rows = min(rows, 64)  # of codes fewer: decodes would wait for the matrix units
        if self.rows == "logit_rows" and not shape.decode:
            rows = min(rows, LOGIT_ROWS)
        operands = epilogue_operands(self)
        product = Product(
            self.mode, self.types[0], self.n, self.k, self.columns, len(operands.parts), len(operands.extras), rows,
            self.bits, self.group, self.experts, self.topk,
        )  # fmt: skip
        return Tiling.of(pick(product, tuner))

    def _args(self) -> dict[str, Arg]:
        """All operands by their names in the source."""
        extras = [f"e{i}_ptr" for i in range(len(self.types) - 1 - self.operands)]
        index = ["index_ptr"] if self.experts else []
        return {arg.name: arg for arg in self.pointers("x_ptr", "w_ptr", "b_ptr", *index, *extras, "y_ptr")}

    @property
    def _count(self) -> Arg:
        return Arg("num_rows", "i32", self.num_rows, aligned=False)

    def _spec(
        self, name: str, tile: Tiling, tuner: Tuner, args: Sequence[Arg], grid: tuple[Extent, Extent, Extent]
    ) -> LaunchSpec:
        source = Source(self, tile, tuple(args), tuner.target.backend == "cuda")
        file, entry = f"{self.template}/{name}.py.jinja", f"linear_{name.split('_')[0]}"
        return LaunchSpec(render(file, source), entry, tuple(args), grid, tile.warps, tile.stages)

    def _decode(self, tile: Tiling, tuner: Tuner) -> LaunchSpec:
        args = list(self._args().values())
        columns = Extent(-(-self.columns // tile.n))
        if self.experts:
            return self._spec(f"decode_{self.mode}", tile, tuner, args, (columns, self._slots, ONE))
        return self._spec(f"decode_{self.mode}", tile, tuner, [*args, self._count], (columns, ONE, ONE))

    def _many(self, tile: Tiling, tuner: Tuner) -> LaunchSpec:
        args = self._args()
        args.pop("index_ptr", None)
        if tile.splits > 1:
            args = {name: args[name] for name in ("x_ptr", "w_ptr")}
            args["sums_ptr"] = _scratch("sums", "*fp32")
        if self.experts:
            args |= {"slots_ptr": _scratch("slots"), "experts_ptr": _scratch("experts")}
        columns = -(-self.columns // tile.n)
        blocks = self._blocks(tile.m) if self.experts else extent(self.num_rows, tile.m)
        tiles = Extent(
            blocks.constant * columns, tuple(Term(t.size, t.divide, t.times * columns) for t in blocks.terms)
        )
        return self._spec("tile", tile, tuner, [*args.values(), self._count], (tiles, Extent(tile.splits), ONE))

    def _reduce(self, tile: Tiling, tuner: Tuner) -> tuple[LaunchSpec]:
        args = [arg for name, arg in self._args().items() if name not in ("x_ptr", "w_ptr")]
        grid = (extent(self.num_rows), Extent(-(-self.columns // 512)), ONE)
        spec = self._spec("reduce", tile, tuner, [*args, _scratch("sums", "*fp32"), self._count], grid)
        return (LaunchSpec(spec.source, spec.entry, spec.args, spec.grid, num_warps=4, num_stages=1),)

    # -- experts ------------------------------------------------------------------------------------------------------

    @property
    def _slots(self) -> Extent:
        return extent(self.num_rows, times=self.topk)

    def _blocks(self, block: int) -> Extent:
        """At most so many blocks of one expert's rows; see `most_blocks`."""
        return extent(self.num_rows, block, self.topk, self.experts + 1)

    def most_blocks(self, block: int, rows: str) -> str:
        """The same in a source: whole blocks of all slots, and one that is not full per expert."""
        return f"(({rows} + {block - 1}) // {block} * {self.topk} + {self.experts + 1})"

    def _sort(self, tile: Tiling) -> tuple[LaunchSpec, LaunchSpec]:
        """Two kernels that put the slots in the order of their experts."""
        source = render(f"{self.template}/expert_sort.py.jinja", SortSource(self, tile.m))
        grid = (Extent(self.experts + 1), ONE, ONE)
        index, counts = self._args()["index_ptr"], _scratch("counts")
        place = (index, counts, _scratch("slots"), _scratch("experts"), self._count)
        return (
            LaunchSpec(source, "expert_count", (index, counts, self._count), grid, num_warps=4),
            LaunchSpec(source, "expert_place", place, grid, num_warps=4),
        )


class ExpertLinear(Linear):
    """Each row's product with the experts it was sent to; operands x, W, bias, index, *extras -> y [rows, topk, width].

    x is [rows, k], or [rows, topk, k] if x_per_slot; an index outside [0, experts) gives a product of zeros.
    """

    operands = 4


def _scratch(name: str, kind: str = "*i32") -> Arg:
    return Arg(f"{name}_ptr", kind, f"scratch:{name}")


LINEARS: dict[str, type[Linear]] = {
    "linear": Linear, "linear_q": Linear, "expert_linear": ExpertLinear, "expert_linear_q": ExpertLinear,
}  # fmt: skip
