"""The facts of a product that its tiling depends on, and the modes: the ways in which a product's operands are
multiplied.

A mode is one class in `modes/`: it owns the names of its templates, their parameters, its tilings, the scratch of its
rows, and its terms of the estimate. Kernels and estimates ask the mode and never test its name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..layouts.codes import WIDE_SLICE, Unpacking
from .choice import Config, power_of_two
from .machine import INLINE, Machine, whole_groups

DEPENDENT = 2.3  # factor on the issue time of a code in a decode kernel, whose warps wait for its instructions
SECOND_EIGHT = 1.0  # additional factor with 16 rows instead of eight
DENSE = 0.88  # share of the peak, in large tiles of warp groups
WHOLE = (0.64, 0.75, 0.93)  # shares of the peak for codes that become values, in tiles of up to 64, 128 and 256 rows


@dataclass(frozen=True)
class ProductFacts:
    """The facts of a product that its tiling depends on.

    parts: products that one output tile needs. extras: other operands of its epilogue. rows: the most rows of x. With
    experts, each row is multiplied with topk of them. codes: how the codes of W are unpacked; None if W is dense.
    coded: whether rows come in 8 bits, if they are multiplied in 8 bits. many: the mode that may be used instead for
    many rows; None for no other mode.
    """

    mode: ProductMode
    x_type: str
    n: int
    k: int
    columns: int
    parts: int
    extras: int
    rows: int
    codes: Unpacking | None
    experts: int
    topk: int
    coded: bool = False
    many: ProductMode | None = None

    @property
    def key(self) -> str:
        """A stable name of the choice, for tuning files."""
        weight = self.codes.name if self.codes else "dense"
        experts = f" experts {self.experts}x{self.topk}" if self.experts else ""
        size = f"{self.columns}x{self.parts}x{self.k} extras {self.extras} rows {self.rows}"
        return f"linear {weight} {self.mode.name} {self.x_type} {size}{experts}{' coded' * self.coded}"

    @property
    def matrix_bytes(self) -> float:
        """Bytes of W, or of one expert's W, that a product reads."""
        item = self.codes.value_bytes if self.codes else self.mode.item
        return self.columns * self.parts * self.k * item

    @property
    def blocks(self) -> bool:
        """Whether scales of blocks of K multiply the sum of each step."""
        return self.codes is not None and self.codes.scale_bytes > 0

    @property
    def apart(self) -> Unpacking | None:
        """How codes are unpacked in registers; None if W is multiplied without unpacking."""
        return None if self.mode.eight and not self.mode.apart else self.codes

    @property
    def narrow(self) -> bool:
        """Whether each row has one of several matrices of few columns, such as the A of adapters: caches hold these,
        and blocks of rows per matrix would occupy only a few multiprocessors."""
        return self.experts > 0 and self.topk == 1 and self.columns <= 256

    @property
    def few(self) -> bool:
        """Whether the kernel for few rows in float32 runs."""
        return self.rows <= self.mode.few_rows(self) and bool(self.codes and self.codes.few)

    @property
    def doubled(self) -> bool:
        """Whether a code takes two fields."""
        return self.apart is not None and self.apart.doubled

    @property
    def unpacks(self) -> bool:
        """Whether all of W may first be unpacked to a 16-bit matrix, because enough rows share that work."""
        codes = self.apart is not None and not self.mode.eight
        return codes and self.x_type != "f32" and self.rows >= 16 and not self.experts


@dataclass(frozen=True)
class Work:
    """A tiling's work for its estimate. waves: waves of programs, one after the other. steps: steps of a program.

    instructions: instructions of a program's warps per step. matrix_seconds: seconds of a step on matrix units at their
    peak.
    """

    waves: int
    steps: int
    instructions: float
    matrix_seconds: float


class ProductMode:
    """How operands are multiplied; by default 16-bit values on matrix units.

    item: bytes of an operand that is multiplied. eight: whether rows are first quantized to 8 bits; scaled_rows: with a
    scale per row; powers: with a power of two per 32 values, which matrix units apply. exact: whether the 8-bit rows
    are integers, whose sums are exact; floats: whether they are 8-bit floats with a scale per row; apart: whether codes
    of W are still unpacked, and their scales multiply the sum of each group. wide: whether operands are multiplied in
    float32; dense: whether W is read in 16 bits without unpacking; codes_operands: whether codes themselves are
    operands; value_operands: whether they are converted to values step by step. runs_ahead: whether a running step
    keeps its operands in shared memory, from sm_90 on.

    decode_template, tile_template, rows_template: templates in triton/linear for few rows, for many rows, and to
    quantize rows to 8 bits; coding: how rows are quantized. codes_type, scales_type: Triton's types of pointers to the
    resulting codes and scales. row_pointer: source that casts a pointer to those bytes to one to elements of the
    product.
    """

    name: ClassVar[str]
    item: ClassVar[int] = 2
    eight: ClassVar[bool] = False
    powers: ClassVar[bool] = False
    scaled_rows: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    apart: ClassVar[bool] = False
    floats: ClassVar[bool] = False
    wide: ClassVar[bool] = False
    dense: ClassVar[bool] = False
    runs_ahead: ClassVar[bool] = True
    codes_operands: ClassVar[bool] = False
    value_operands: ClassVar[bool] = False
    large_share: ClassVar[float] = DENSE  # share of the peak, in large tiles of warp groups
    decode_instructions: ClassVar[float] = 0.08  # per value in kernels for few rows that unpack no codes
    decode_template: ClassVar[str] = "decode_dense"
    tile_template: ClassVar[str] = "tile"
    rows_template: ClassVar[str] = "rows"
    coding: ClassVar[str] = ""
    codes_type: ClassVar[str] = "*u8"
    scales_type: ClassVar[str] = "*fp32"
    row_pointer: ClassVar[str] = ""

    @abstractmethod
    def candidates(self, machine: Machine, p: ProductFacts) -> list[Config]:
        """All tilings worth trying, except those that unpack W in a separate kernel."""

    def few_rows(self, p: ProductFacts) -> int:
        """The most rows for which the kernel for few rows in float32 runs, if the codes have one; 0: never."""
        return 0

    def inline(self, decode: bool, rows: int) -> bool:
        """Whether programs of few rows quantize them to 8 bits themselves, if the mode needs that."""
        return decode and rows <= INLINE

    def scale_words(self, k: int) -> int:
        """Scales of 4 bytes that a row of k 8-bit values has."""
        return 1

    def shared_row(self, p: ProductFacts, k: int) -> int:
        """Bytes of shared memory for k values of a row of W."""
        return p.codes.shared_bytes(k) if p.codes else k * self.item

    def bounds(self, bounds: Sequence[float], work: Work, c: Config) -> list[float]:
        """The estimate's seconds of each resource, adjusted for this mode; `bounds[3]` is instruction issue."""
        return list(bounds)

    def beside(self, machine: Machine, p: ProductFacts) -> bool:
        """Whether a step has its own sums beside those of all steps."""
        return False

    def whole(self, machine: Machine, p: ProductFacts, c: Config) -> bool:
        """Whether values are multiplied, not codes; see ProductSource.whole_values."""
        whole = p.apart is not None and p.apart.whole
        return whole and not c["decode"] and whole_groups(machine.level, c["n"], c["warps"])

    def rate(self, machine: Machine, p: ProductFacts, c: Config, resident: int) -> float:
        """The share of the peak that matrix instructions reach."""
        groups = min(resident * c["warps"] / 8, 1.0)  # eight warps hide each other's waits
        if machine.hip:
            return 0.4 * groups
        large = not c["decode"] and c["n"] >= 64 and c["warps"] >= 4
        if self.whole(machine, p, c):
            return WHOLE[(c["m"] > 64) + (c["m"] > 128)] * max(groups, 0.6)
        if machine.level >= 90 and large:  # instructions of a warp group; reads of shared memory may bound them
            shared = 1.0 if p.apart else min(1.0, 90 / (64 + 4096 / c["m"]))
            return self.large_share * shared * max(groups, 0.6)
        return {80: 0.75, 86: 0.75, 89: 0.75, 90: 0.5}.get(machine.level, 0.25) * groups

    def instructions(self, machine: Machine, p: ProductFacts, c: Config) -> float:
        """Instructions that the warps of a program issue per step, as counted in disassembled kernels."""
        per_slice = c["n"] * p.parts * c["k"] / 32  # weights per lane
        loads = 60 + c["m"] * c["k"] * 2 / 512 * 3
        if c["decode"]:
            slower = DEPENDENT * (1 + SECOND_EIGHT * (c["m"] > 8))
            unpack = slower * p.apart.decode_instructions if p.apart else self.decode_instructions
            return c["warps"] * (per_slice * (unpack + 0.02 * c["m"]) + loads)
        unpack = p.apart.tile_instructions if p.apart else 0.05
        if self.whole(machine, p, c):  # the scale costs one instruction for two values
            return per_slice * (unpack + 0.5) + c["warps"] * 90 + loads
        each = 1.1 if p.apart else 0.1 + self.beside(machine, p) * (2 if p.blocks else 1)
        products = c["n"] * p.parts * c["m"] / 32 * each
        return per_slice * unpack + products + c["warps"] * 60 + loads


def few_tiling(p: ProductFacts) -> list[Config]:
    """The tiling of the kernel for few rows in float32."""
    assert p.codes is not None
    m = 1 if p.experts else power_of_two(p.rows)
    sums = 16 if p.codes.decode_registers else 32  # per thread and part, of all rows
    n = max(power_of_two(4 * sums // p.codes.bits // (2 * m * p.parts)), 1)
    return [{"decode": 1, "m": m, "n": n, "k": WIDE_SLICE, "warps": 4, "stages": 2, "splits": 1}]


def row_heights(p: ProductFacts) -> list[int]:
    """Heights of tiles: several for experts, whose number of rows is unknown; else the one that fits the rows."""
    return [16, 32, 64, 128] if p.experts else [min(max(p.rows, 16), 128)]


def decode_tilings(machine: Machine, p: ProductFacts) -> list[Config]:
    """Tilings of kernels for few rows on matrix units, whose warps each compute their own slices of K."""
    least = 16 if machine.hip else 8  # columns of the smallest matrix instruction
    m = least if p.experts else max(p.rows, least)
    slices = (p.codes.group,) if p.codes else (64, 128)
    stages = (2,) if machine.hip else (3, 4, 5, 6)
    return [
        {"decode": 1, "m": m, "n": n, "k": k, "warps": warps, "stages": depth, "splits": 1}
        for n in (16, 32, 64) if n * p.parts <= 64
        for k in slices
        for warps in (4, 8, 16) if warps < 16 or not machine.hip
        if k * warps * 2 <= p.k or warps == 4  # with only one step, nothing is loaded ahead
        for depth in stages
    ]  # fmt: skip
