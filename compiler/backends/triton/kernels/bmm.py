"""Products of each row's own matrices, or of each row's matrices with one weight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .....runtime.format.manifest import Limits
from .....runtime.format.plan import Extent, extent
from ....program.steps import rowwise as steps
from ....targets import Target
from ...render import render
from ..spec import LaunchSpec, Shape, StepKernel
from ..tiling.choice import Config, Tuner, power_of_two

VECTOR = {"m": 1, "n": 0, "k": 0}  # one line per program, no tensor cores
LEAST = 16  # the least sizes that tl.dot takes
VECTOR_BLOCK = 4096  # elements of b that a program holds in vector products
ITEM = {"f32": 4, "bf16": 2, "f16": 2}


@dataclass(frozen=True)
class BmmKernel(StepKernel[steps.Bmm]):
    """c [rows, batch, m, n] = a [rows, batch, m, k] b [rows, batch, k, n], or b [.., n, k] if transposed.

    If all rows share one b, the m lines of many rows form one tile.
    """

    template: ClassVar[str] = "triton/bmm.py.jinja"
    entry: ClassVar[str] = "bmm"

    @property
    def shared(self) -> bool:
        """Whether all rows multiply with the same b."""
        return self.step.b.stride == 0

    def lines(self, shape: Shape) -> int:
        """Lines of a that multiply with one matrix b, at most."""
        return self.step.m * shape.max_tokens if self.shared else self.step.m

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        lines = self.lines(shape)
        if lines < LEAST:
            tile = Tile(kernel=self, **VECTOR)
        else:
            s, types = self.step, "".join(o.dtype for o in self.step.operands.values())
            key = f"bmm {s.batch}x{s.m}x{s.k}x{s.n} {types} {self.shared} {shape.max_tokens}"
            config = tuner.pick(key, self._tiles(lines), lambda c: self._cost(c, shape, tuner.target))
            tile = Tile(kernel=self, m=config["m"], n=config["n"], k=config["k"])
        args = (*self.pointers(a="a_ptr", b="b_ptr", c="c_ptr"), self.count)
        return (
            LaunchSpec(render(self.template, tile, self.step), self.entry, args, tile.grid, num_warps=4, num_stages=3),
        )

    @property
    def narrow(self) -> bool:
        """Whether both operands have the same 16-bit type, so that tensor cores can multiply them."""
        return self.step.a.dtype == self.step.b.dtype != "f32"

    def _tiles(self, lines: int) -> list[Config]:
        """Tiles that are not much larger than the matrices; without tensor cores they need more registers."""
        heights = [m for m in (16, 32, 64) if m <= max(power_of_two(lines), LEAST)]
        widths = [w for w in (32, 64, 128) if w <= max(power_of_two(self.step.n), 32)]
        most = 64 * 128 if self.narrow else 32 * 64
        return [{"m": m, "n": w, "k": 32} for m in heights for w in widths if m * w <= most]

    def _cost(self, config: Config, shape: Shape, target: Target) -> float:
        """Seconds: the larger of the time at peak rate and the time to read the operands, in whole waves of tiles."""
        tile = Tile(kernel=self, m=config["m"], n=config["n"], k=config["k"])
        tiles = tile.count(shape.max_tokens)
        waves = -(-tiles // target.multiprocessors) * target.multiprocessors / tiles
        # float32 products use no tensor cores: about a sixteenth of their rate
        roof = target.roofline(share=1.0 if self.narrow else 1 / 16)
        flops = 2.0 * tiles * config["m"] * config["n"] * self.step.k
        item = max(ITEM[o.dtype] for o in (self.step.a, self.step.b))
        read = tiles * (config["m"] + config["n"]) * self.step.k * item
        if (config["m"] + config["n"]) * config["k"] * item * 3 > target.shared_memory_kib * 1024:
            return float("inf")
        return waves * roof.seconds(read, flops)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The parameters of the template: the product and the tile that one program computes."""

    kernel: BmmKernel = field(repr=False)
    m: int
    n: int
    k: int

    @property
    def entry(self) -> str:
        """The name of the function that the template defines."""
        return self.kernel.entry

    @property
    def dots(self) -> bool:
        """Whether a program makes a tile with tl.dot, else one line of c."""
        return self.m >= LEAST

    @property
    def m_block(self) -> int:
        """Lines of one row in a tile."""
        return min(power_of_two(self.kernel.step.m), self.m)

    @property
    def row_block(self) -> int:
        """Rows in a tile."""
        return self.m // self.m_block if self.kernel.shared else 1

    @property
    def lines(self) -> int:
        """Lines in a tile."""
        return max(self.row_block * self.m_block, LEAST) if self.dots else 1

    @property
    def m_tiles(self) -> int:
        """Tiles over the lines of one row."""
        return -(-self.kernel.step.m // self.m_block)

    @property
    def k_block(self) -> int:
        """Elements of k at a time."""
        if self.dots:
            return self.k
        return min(power_of_two(self.kernel.step.k), 256 if self.kernel.step.b_transposed else 32)

    @property
    def n_block(self) -> int:
        """Columns of a tile."""
        if self.dots:
            return self.n
        return min(power_of_two(self.kernel.step.n), max(VECTOR_BLOCK // self.k_block, 16), 128)

    @property
    def partial_k(self) -> bool:
        """Whether the last step along k is narrower."""
        return self.kernel.step.k % self.k_block != 0

    @property
    def grid(self) -> tuple[Extent, Extent, Extent]:
        """Blocks of rows, blocks of columns, and (matrix, block of lines)."""
        columns = -(-self.kernel.step.n // self.n_block)
        return (
            extent(self.kernel.num_rows, self.row_block),
            Extent(columns),
            Extent(self.kernel.step.batch * self.m_tiles),
        )

    def count(self, rows: int) -> int:
        """Programs for that many rows."""
        sizes = {self.kernel.num_rows: rows}
        x, y, z = (dim.value(sizes) for dim in self.grid)
        return x * y * z
