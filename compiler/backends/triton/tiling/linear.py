"""Which tilings a product may take on a target, and an estimate of what each costs.

The estimate is a roofline per resource: memory, the second-level cache, matrix units, instruction issue, and the
latency of the steps that one program takes in turn. Constants were fitted to the tilings of 172 products (bf16, 4 and 8
bits, 1 to 8,192 rows) timed on an H100: benchmarks/NOTES.md says how well they choose. `icc tune` replaces the choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from .....runtime.format.plan import COUNTERS
from .....runtime.format.roofline import Roofline
from ....targets import Target
from ..layouts.codes import VALUE_STEP, WIDE_SLICE, Unpacking
from .choice import Config, Tuner, power_of_two

STREAMED = 0.93  # of the bandwidth, where tiles run ahead of what they multiply
READ = 0.85  # of the bandwidth, of other kernels
LATENCY = 0.45e-6  # seconds from a request to memory to its data, under load
LAUNCH = 1.0e-6  # seconds that one more kernel costs
CACHE_PER_SM = 94e9  # bytes/s that a multiprocessor reads from the second-level cache
SPLIT = 2.4e-6  # seconds that a kernel costs which adds up what splits of K left
MERGE = 2 * LATENCY  # seconds until a program knows that it ends last, and has what the others left
INLINE = 1  # rows that every program of a product of few rows brings to 8 bits itself
MERGED_ROWS = 64  # of a tile, whose splits the last program adds up
SPLIT_PER_SM = 31e9  # bytes/s of these sums that a multiprocessor writes and reads again
DEPENDENT = 2.3  # times longer than its instructions alone a code takes in a decode kernel, whose warps wait for them
WARP_SUM = 0.34e-6  # seconds per warp beyond four of a decode kernel of eight rows, whose warps add up their sums
SECOND_EIGHT = 1.0  # so many times longer again with 16 rows than with eight
DENSE = 0.88  # of the peak, in large tiles of warp groups
WHOLE = (0.64, 0.75, 0.93)  # of the peak, where values of codes are multiplied in tiles of up to 64, 128 and 256 rows
ISSUE_PER_SM = 3.8e9  # instructions of a warp per second: four schedulers at 60 %
FEW = 8.0  # instructions per value and row of a kernel for few rows in float32, besides those that read the code
ALONE = 1.35e-9  # seconds between two instructions of a warp that makes values of blocks, each waiting for others
CROWDED = 1.5  # times longer its instructions take, of all warps of a multiprocessor, than others
SCALED_STEP = 0.22e-6  # seconds of a step of MXFP4 beside its product: scales brought to the matrix unit, waited for
UNPACK = 14.0  # instructions per value where a matrix is unpacked by itself
REGISTERS = 65536  # of a multiprocessor, 32 bits each


ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 4096)  # classes of row counts; one choice for each


def whole_groups(level: int, n: int, warps: int) -> bool:
    """Whether matrix units run beside the warps that unpack n columns: from sm_90 on, in tiles that give each warp its
    own columns; those of sm_100 take all their columns from four warps."""
    if level >= 100:
        return n == 128 and warps == 4
    return level >= 90 and n >= 64 and warps % 4 == 0 and n >= 16 * warps


def merges(m: int, splits: int, tiles: int) -> bool:
    """Whether the program of a split tile that ends last adds up what all left, rather than a kernel of its own: tiles
    of few rows, which one program reads in less time than a launch takes. tiles: of the output, each with a counter,
    and one for all of them."""
    return splits > 1 and m <= MERGED_ROWS and tiles < COUNTERS


def sums_of_steps(level: int) -> bool:
    """Whether products of 8-bit floats are added up step by step in float32: the matrix units of sm_89 and sm_90 keep
    13 bits of their sums (Zhang et al. 2024, SageAttention2; DeepSeek-V3's report, section 3.3.2)."""
    return level < 100


@dataclass(frozen=True)
class LinearTiling:
    """Blocks of m rows and n columns; k: one slice or step of K; splits: programs that share one tile's K.

    decode: whether the kernel for few rows runs, in which every warp takes its own slices of K. unpacked: whether codes
    become a 16-bit matrix in scratch first, which the kernel for dense weights then reads.
    """

    decode: int
    m: int
    n: int
    k: int
    warps: int
    stages: int
    splits: int = 1
    unpacked: int = 0

    @staticmethod
    def of(config: Config) -> LinearTiling:
        """From what the tuner picked."""
        return LinearTiling(**config)

    def merges(self, tiles: int) -> bool:
        """See `merges`. tiles: of the output."""
        return merges(self.m, self.splits, tiles)


@dataclass(frozen=True)
class ProductFacts:
    """The facts of a product that its tiling depends on.

    parts: products that one output tile needs. extras: other operands of its epilogue. rows: of x, at most. With
    experts, each row is multiplied with topk of them. codes: how those of W are taken apart; None where it is dense.
    coded: whether rows come in 8 bits, where they are multiplied so.
    """

    mode: str
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

    @property
    def key(self) -> str:
        """A stable name of the choice."""
        weight = self.codes.name if self.codes else "dense"
        experts = f" experts {self.experts}x{self.topk}" if self.experts else ""
        size = f"{self.columns}x{self.parts}x{self.k} extras {self.extras} rows {self.rows}"
        return f"linear {weight} {self.mode} {self.x_type} {size}{experts}{' coded' * self.coded}"

    @property
    def matrix_bytes(self) -> float:
        """Bytes of W that a product reads, of one expert."""
        item = self.codes.value_bytes if self.codes else self.item
        return self.columns * self.parts * self.k * item

    @property
    def item(self) -> int:
        """Bytes of an operand that is multiplied."""
        return 4 if self.mode == "wide" else 1 if self.eight else 2

    @property
    def eight(self) -> bool:
        """Whether rows are brought to 8 bits first."""
        return self.mode in ("int8", "fp8", "mxfp8")

    @property
    def micro(self) -> bool:
        """Whether matrix units scale 32 values at a time."""
        return self.mode == "mxfp8"

    @property
    def blocks(self) -> bool:
        """Whether scales of blocks of K meet the sums of each step."""
        return self.codes is not None and self.codes.scale_bytes > 0

    @property
    def apart(self) -> Unpacking | None:
        """How codes are taken apart in registers; None where W is multiplied as it lies in memory."""
        return None if self.eight else self.codes

    @property
    def few(self) -> bool:
        """Whether the kernel for few rows in float32 runs."""
        most = 8 if not self.micro or self.experts else 0 if self.coded else INLINE
        return self.mode in ("wide", "blocks", "mxfp8") and self.rows <= most and bool(self.codes and self.codes.few)

    @property
    def doubled(self) -> bool:
        """Whether a code takes two fields."""
        return self.apart is not None and self.apart.doubled

    @property
    def unpacks(self) -> bool:
        """Whether all of W may become a 16-bit matrix first: where enough rows share that work."""
        return self.apart is not None and self.x_type != "f32" and self.rows >= 16 and not self.experts

    @property
    def dense(self) -> ProductFacts:
        """The same product with W in 16 bits."""
        return replace(self, mode="dense", codes=None)


def pick(product: ProductFacts, tuner: Tuner) -> Config:
    """The tiling for a product; one choice for all row counts of a class, so that phases share objects."""
    rows = next((r for r in ROWS if product.rows <= r), ROWS[-1])
    if product.few:
        rows = power_of_two(product.rows)  # each has sums of its own
    elif product.eight and not product.coded and product.rows <= INLINE:
        rows = product.rows  # which are not brought to 8 bits by a kernel of their own
    known = replace(product, rows=rows)
    machine = Machine(tuner.target)
    return tuner.pick(known.key, machine.candidates(known), lambda config: machine.seconds(known, config))


@dataclass(frozen=True)
class Machine:
    """A target as the estimates see it."""

    target: Target

    @property
    def hip(self) -> bool:
        return self.target.backend == "hip"

    @property
    def level(self) -> int:
        """Compute capability, 0 for HIP."""
        return self.target.level

    @property
    def _read(self) -> Roofline:
        """What kernels reach that do not run ahead of what they read."""
        return self.target.roofline(memory=READ)

    def candidates(self, p: ProductFacts) -> list[Config]:
        """All tilings worth a try."""
        if p.micro:
            return [*(self._few(p) if p.few else []), *self._scaled(p)]
        if p.eight:
            return [*(self._decode(p) if p.rows <= 16 else []), *self._eight(p)]
        unpacked = [{**c, "unpacked": 1} for c in self.candidates(p.dense)] if p.unpacks else []
        if p.mode == "blocks":
            return [*(self._few(p) if p.rows <= 8 else []), *self._blocks(p), *unpacked]
        if p.mode == "wide":
            return [*self._wide(p), *unpacked]
        found = [*(self._decode(p) if p.rows <= 16 else []), *self._tiles(p)]
        return [*(config for config in found if self._keeps_registers(p, config)), *unpacked]

    def _decode(self, p: ProductFacts) -> list[Config]:
        least = 16 if self.hip else 8  # columns of the smallest matrix instruction
        m = least if p.experts else max(p.rows, least)
        slices = (p.codes.group,) if p.codes else (64, 128)
        stages = (2,) if self.hip else (3, 4, 5, 6)
        return [
            {"decode": 1, "m": m, "n": n, "k": k, "warps": warps, "stages": depth, "splits": 1}
            for n in (16, 32, 64) if n * p.parts <= 64
            for k in slices
            for warps in (4, 8, 16) if warps < 16 or not self.hip
            if k * warps * 2 <= p.k or warps == 4  # with one step only, nothing runs ahead
            for depth in stages
        ]  # fmt: skip

    def _tiles(self, p: ProductFacts) -> list[Config]:
        m = [16, 32, 64, 128] if p.experts else [min(max(p.rows, 16), 128)]
        m += [64] if p.rows >= 128 else []
        m += [32] if p.rows == 64 and 0 < self.level < 90 and p.parts > 1 else []
        m += [256] if p.rows >= 256 else []
        steps = -(-p.k // (p.codes.group if p.codes else 64))
        splits = [1, *(s for s in (2, 4, 8) if steps >= 4 * s and p.rows <= 1024 and not p.experts)]
        shapes = [(64, 4), (64, 8), (128, 4), (128, 8)]
        if 0 < self.level < 90 and p.codes:  # a warp takes 16 columns: with fewer, several would compute the same
            shapes = [(32, 4) if p.doubled else (32, 2), (64, 2), *shapes]
        elif self.level < 90:
            shapes = [(32, 4), *shapes]
        elif p.codes and self.level >= 100:  # the newest take their left operand from tensor memory, or are a warp's
            shapes = [(32, 2), (64, 2), *([(128, 4)] if p.codes.whole else [])]
        elif p.codes:  # with fewer than 16 columns per warp, several would compute the same
            shapes = [(64, 4), (128, 8)]
        return [
            {"decode": 0, "m": rows, "n": n, "k": k, "warps": warps, "stages": depth, "splits": split}
            for rows in m
            for n, warps in shapes
            for k in ((p.codes.group,) if p.codes else (64,))
            for depth in ((2,) if self.hip else (3, 4, 5))
            for split in splits
            if self._apart(p, rows, n, warps)
        ]  # fmt: skip

    def _apart(self, p: ProductFacts, rows: int, n: int, warps: int) -> bool:
        """Whether instructions of single warps on codes compute nothing twice, and x is copied 16 bytes at a time: of
        codes of 4 bits each of four pieces by itself. Codes of two fields have no other tiles that fit registers."""
        if p.codes is None or p.doubled or not 0 < self.level < 90:
            return True
        return (n >= 16 * warps or rows >= 16 * warps) and (p.codes.bits > 4 or rows >= 8 * warps)

    def _keeps_registers(self, p: ProductFacts, c: Config) -> bool:
        """Whether a tile fits into registers; found by compiling all of them for sm_80, sm_90, sm_100 and gfx942."""
        if c["decode"]:
            return True
        sums = c["m"] * c["n"] // (self.target.warp_size * c["warps"])
        old = self.level < 90
        if not p.codes:
            crowded = old and (sums > 64 or (p.parts > 1 and sums > 32 and (c["warps"] < 8 or c["m"] > 128)))
            whole = sums * (p.parts + p.extras) <= 128 and not crowded
            halves = not old and not p.experts and sums * (2 * p.parts + p.extras) <= 384  # see ProductSource.halves
            return whole or (sums * p.parts <= 128 and halves)
        if self._whole(p, c):
            room = c["warps"] >= 8 and not p.doubled
            if self.level >= 100:  # tensor memory holds 512 columns: the sums, and a step of each part of W
                room = p.parts == 1 and not p.doubled
                return sums * p.parts <= (256 if room else 128)
            return sums * p.parts <= (128 if room else 64)
        if self.hip and p.doubled and c["n"] > 64:
            return False
        limit = 64 if not p.doubled or (p.parts == 1 and not old) else 32
        if c["n"] > 16 * c["warps"]:  # a warp unpacks more than 16 columns at once
            sums *= 2
        most = 64 if c["n"] < 64 else 32 if p.doubled and p.parts > 1 and old else 128
        crowded = old and p.parts > 1 and (c["n"] > 64 or (c["m"] == 64 and (c["n"] == 64 or p.codes.bits == 8)))
        return sums * p.parts <= limit and c["m"] <= most and not crowded

    def _whole(self, p: ProductFacts, c: Config) -> bool:
        """Whether values are multiplied, not codes; see ProductSource.whole_values."""
        whole = p.apart is not None and p.apart.whole
        return whole and not c["decode"] and whole_groups(self.level, c["n"], c["warps"])

    def _eight(self, p: ProductFacts) -> list[Config]:
        """Products of 8 bits on matrix units, which take at least 16 rows and 32 of K.

        Sums of int8 are whole numbers, and stay so: K is not split.
        """
        assert p.codes is not None
        floats = p.mode == "fp8"
        m = [16, 32, 64, 128] if p.experts else [min(max(p.rows, 16), 128)]
        m += ([64] if p.rows >= 128 and not p.experts else []) + ([256] if floats and p.rows >= 256 else [])
        steps = -(-p.k // 128)
        splits = [1, *(s for s in (2, 4, 8) if floats and steps >= 4 * s and p.rows <= 1024 and not p.experts)]
        sums = 64 if not floats or self.level < 90 else 128
        return [
            {"decode": 0, "m": rows, "n": n, "k": k, "warps": warps, "stages": depth, "splits": split}
            for rows in m
            for n, warps in ((32, 4), (64, 4), (128, 4), (128, 8)) if n >= 64 or not floats or self.level < 90
            for k in ((p.codes.group,) if p.blocks else (64, 128))
            for depth in ((2,) if self.hip else (3, 4))
            for split in splits
            if rows * n * (p.parts + self._beside(p)) <= sums * self.target.warp_size * warps
        ]  # fmt: skip

    def _beside(self, p: ProductFacts) -> bool:
        """Whether the sums of a step of 8-bit floats are beside those of all."""
        return p.mode == "fp8" and (sums_of_steps(self.level) or p.blocks)

    def _scaled(self, p: ProductFacts) -> list[Config]:
        """Tiles of MXFP4 and MXFP8, whose instructions take 128 columns."""
        m = [16, 32, 64, 128] if p.experts else [min(max(p.rows, 16), 128)]
        m += ([64] if p.rows >= 128 else []) + ([256] if p.rows >= 256 else []) if not p.experts else []
        return [
            {"decode": 0, "m": rows, "n": 128, "k": k, "warps": warps, "stages": depth, "splits": split}
            for rows in m
            for warps in (4, 8) if rows * p.parts <= 32 * warps
            for k in (128, 256) if k <= max(p.k, 128)
            for depth in (3, 4)
            for split in (1, *(s for s in (2, 4, 8) if -(-p.k // k) >= 4 * s and p.rows <= 1024 and not p.experts))
        ]  # fmt: skip

    def _few(self, p: ProductFacts) -> list[Config]:
        """The kernel for few rows in float32."""
        assert p.codes is not None
        m = 1 if p.experts else power_of_two(p.rows)
        sums = 16 if p.codes.decode_registers else 32  # per thread and part, of all rows
        n = max(power_of_two(4 * sums // p.codes.bits // (2 * m * p.parts)), 1)
        return [{"decode": 1, "m": m, "n": n, "k": WIDE_SLICE, "warps": 4, "stages": 2, "splits": 1}]

    def _blocks(self, p: ProductFacts) -> list[Config]:
        """Tiles of values of blocks, on matrix units. On sm_100 of two warps: four would compute 32 columns twice, and
        wait for each other at 8 barriers a step with more."""
        assert p.codes is not None
        m = [16, 32, 64, 128] if p.experts else [min(max(p.rows, 16), 128)]
        m += [64] if p.rows >= 128 else []
        k = max(VALUE_STEP, p.codes.group)
        splits = [1, *(s for s in (2, 4, 8) if -(-p.k // k) >= 4 * s and p.rows <= 256 and not p.experts)]
        return [
            {"decode": 0, "m": rows, "n": n, "k": k, "warps": warps, "stages": depth, "splits": split}
            for rows in m
            for n, warps in (((32, 2),) if self.level >= 100 else ((32, 4), (64, 4), (128, 8)))
            if n >= 64 or p.rows < 64 or warps == 2
            for depth in ((2,) if self.hip else (3, 4))
            for split in splits
            if rows * n * p.parts <= (32 if 0 < self.level < 90 or warps == 2 else 64) * self.target.warp_size * warps
        ]  # fmt: skip

    def _wide(self, p: ProductFacts) -> list[Config]:
        """Products in float32, on the ordinary units: small tiles, for these are rare."""
        if p.few:
            return self._few(p)
        split = next((s for s in (8, 4, 2) if p.k >= 256 * s and p.rows <= 64 and not p.experts), 1)
        return [{"decode": 0, "m": 16, "n": 32, "k": 32, "warps": 4, "stages": 2, "splits": split}]

    def seconds(self, p: ProductFacts, c: Config) -> float:
        """Estimated time; infinity where the tiling does not fit."""
        if c.get("unpacked"):
            dense = self.seconds(p.dense, {k: v for k, v in c.items() if k != "unpacked"})
            return 2 * self._unpack_seconds(p) + dense  # steps of a class may have half of its rows
        if p.few and c["decode"]:
            return self._few_seconds(p)
        resident = self._resident(p, c)
        if not resident:
            return inf
        sms = self.target.multiprocessors
        slots = p.rows * p.topk if p.experts else p.rows
        active = min(slots, p.experts) if p.experts else 1  # matrices that are read
        tiles_n = -(-p.columns // c["n"])
        if c["decode"]:
            tiles_m = slots if p.experts else 1
        else:
            tiles_m = active - (-slots // c["m"]) if p.experts else -(-p.rows // c["m"])
        programs = tiles_n * tiles_m * c["splits"]
        steps = -(-p.k // (c["k"] * c["splits"] * (c["warps"] if c["decode"] else 1)))
        busiest = -(-programs // sms)  # programs of one multiprocessor
        waves = -(-busiest // resident)
        slab = steps * c["k"] * (c["warps"] if c["decode"] else 1)  # of K, per program
        weight = p.matrix_bytes / (p.columns * p.k)  # bytes per column and k
        bands = 1 if p.experts or c["decode"] else -(-tiles_m // 8)  # each reads W from memory once
        memory = active * p.matrix_bytes * bands
        cache = programs * slab * (c["n"] * weight + min(c["m"], p.rows) * min(p.item, 2))
        peak = self.target.roofline(eight=p.eight)
        reached = self.target.roofline(p.eight, self._matrix_rate(p, c, min(resident, busiest)), STREAMED)
        flops = 2.0 * busiest * c["m"] * c["n"] * p.parts * slab
        bounds = [
            reached.memory_seconds(memory + 2 * p.k * p.rows),
            cache / (CACHE_PER_SM * sms),
            reached.arithmetic_seconds(flops * sms),
            busiest * steps * self._instructions(p, c) / ISSUE_PER_SM,
            waves * (steps / max(c["stages"] - 1, 1) + 1) * LATENCY,
        ]
        if p.micro:
            bounds.append(waves * steps * (SCALED_STEP + peak.arithmetic_seconds(flops / busiest / steps * sms)))
        if p.mode == "blocks":
            each = self._instructions(p, c)
            bounds.append(waves * steps * each / c["warps"] * ALONE)
            bounds[3] *= CROWDED
        extra = LAUNCH + (WARP_SUM * (c["warps"] - 4) * c["m"] / 8 if c["decode"] else 0.0)
        codes_rows = p.eight and not p.coded
        if codes_rows and c["decode"] and p.rows <= INLINE:  # each program looks for the largest value of a row first
            extra += 2 * LATENCY
        elif codes_rows:  # the kernel that brings rows to 8 bits
            extra += LAUNCH + LATENCY + self._read.memory_seconds(3.0 * p.rows * p.k)
        if c["splits"] > 1:
            sums = 4.0 * c["splits"] * p.parts
            if merges(c["m"], c["splits"], tiles_n * tiles_m):
                extra += MERGE + sums * c["m"] * c["n"] * (tiles_n * tiles_m / (SPLIT_PER_SM * sms) + 1 / CACHE_PER_SM)
            else:
                extra += SPLIT + 2 * sums * p.rows * p.columns / (SPLIT_PER_SM * sms)
        if p.experts and not c["decode"]:
            extra += 2 * LAUNCH + 2 * LATENCY * (1 + slots / 1024)
        return extra + max(bounds) + 0.1 * sum(bounds)

    def _unpack_seconds(self, p: ProductFacts) -> float:
        """Estimated time in which all of W becomes a 16-bit matrix: read, computed value by value, written."""
        assert p.codes is not None
        values = p.n * p.k
        memory = self._read.memory_seconds(values * (p.codes.value_bytes + 2))
        each = p.codes.tile_instructions + 3 if p.mode == "blocks" else UNPACK
        issue = values * each / 32 / (ISSUE_PER_SM * self.target.multiprocessors)
        return LAUNCH + LATENCY + max(memory, issue)

    def _few_seconds(self, p: ProductFacts) -> float:
        """Estimated time of few rows in float32."""
        assert p.codes is not None
        active = min(p.rows * p.topk, p.experts) if p.experts else 1
        values = active * p.columns * p.parts * p.k
        issue = (
            values * (p.codes.decode_instructions + FEW * p.rows) / 32 / (ISSUE_PER_SM * self.target.multiprocessors)
        )
        return LAUNCH + LATENCY + max(self._read.memory_seconds(active * p.matrix_bytes), issue)

    def _matrix_rate(self, p: ProductFacts, c: Config, resident: int) -> float:
        """The share of the peak that matrix instructions reach."""
        if p.mode == "wide":
            return 0.02
        groups = min(resident * c["warps"] / 8, 1.0)  # eight warps hide what the others wait for
        if self.hip:
            return 0.4 * groups
        large = not c["decode"] and c["n"] >= 64 and c["warps"] >= 4
        if self._whole(p, c):
            return WHOLE[(c["m"] > 64) + (c["m"] > 128)] * max(groups, 0.6)
        if self.level >= 90 and large:  # instructions of a warp group; what they read of shared memory may bound them
            shared = 1.0 if p.apart else min(1.0, 90 / (64 + 4096 / c["m"]))
            return (0.6 if p.apart else 0.75 if p.eight else DENSE) * shared * max(groups, 0.6)
        return {80: 0.75, 86: 0.75, 89: 0.75, 90: 0.5}.get(self.level, 0.25) * groups

    def _instructions(self, p: ProductFacts, c: Config) -> float:
        """Instructions that the warps of a program issue per step, as counted in disassembled kernels."""
        per_slice = c["n"] * p.parts * c["k"] / 32  # weights per lane
        loads = 60 + c["m"] * c["k"] * 2 / 512 * 3
        if c["decode"]:
            slower = DEPENDENT * (1 + SECOND_EIGHT * (c["m"] > 8))
            unpack = slower * p.apart.decode_instructions if p.apart else 0.6 if p.eight else 0.08
            return c["warps"] * (per_slice * (unpack + 0.02 * c["m"]) + loads)
        if p.micro:
            copies = c["m"] * c["k"] / 16 + p.parts * c["n"] * c["k"] / 16  # of 16 and 8 bytes
            return 3.5 * copies / 32 + c["warps"] * (60 + 45 * p.parts)
        unpack = p.apart.tile_instructions if p.apart else 0.05
        if self._whole(p, c):  # the scale costs one for two values
            return per_slice * (unpack + 0.5) + c["warps"] * 90 + loads
        each = 1.1 if p.apart else 0.1 + self._beside(p) * (2 if p.blocks else 1)
        products = c["n"] * p.parts * c["m"] / 32 * each
        return per_slice * unpack + products + c["warps"] * 60 + loads

    def _resident(self, p: ProductFacts, c: Config) -> int:
        """Programs that a multiprocessor holds at once; 0 if not even one fits."""
        fit = self.target.shared_memory_kib * 1024 // max(self.shared_bytes(p, c), 1024)
        lanes = self.target.warp_size * c["warps"]
        files = REGISTERS * (2 if self.hip else 1)
        if self.level >= 100 and c["n"] >= 64 and c["warps"] >= 4 and not c["decode"]:  # columns of tensor memory
            columns = p.parts * (c["m"] + (64 if p.apart else 16 if p.micro else 0))
            fit = min(fit, 512 // power_of_two(max(columns, 32)))
        return min(fit, self.target.max_warps // c["warps"], max(int(files / (self.registers(p, c) * lanes)), 1))

    def shared_bytes(self, p: ProductFacts, c: Config) -> int:
        """Estimated shared memory."""
        slices = c["warps"] if c["decode"] else 1
        row = p.codes.shared_bytes(c["k"]) if p.codes and not p.micro else c["k"] * p.item
        w = p.parts * c["n"] * row * slices
        x = c["m"] * c["k"] * p.item * slices
        depth = max(c["stages"] - 1, 1)
        ahead = (
            not c["decode"] and self.level >= 90 and p.mode not in ("wide", "mxfp8")
        )  # a step that runs keeps its operands
        sums = 4 * p.parts * c["m"] * c["n"] * slices if c["decode"] else (4 if self.hip else 2) * c["m"] * c["n"]
        total = depth * (w + x) + (4096 if p.apart and c["n"] < 16 * c["warps"] else 0)
        if ahead:
            total += x if p.apart else w + x
        return max(total, sums)

    def registers(self, p: ProductFacts, c: Config) -> int:
        """Estimated registers per thread, after those of compiled kernels."""
        old = 40 if self.level < 90 else 0  # operands of a warp's instructions all pass through registers
        if c["decode"]:
            if not p.codes:
                return 32 + c["n"] * p.parts // 2 + c["m"]
            return int((36 + 1.4 * c["n"] * p.parts) * (1 + (c["m"] - 8) / 32)) + p.codes.decode_registers + old
        sums = c["m"] * c["n"] // (self.target.warp_size * c["warps"])
        if self._whole(p, c):
            return min(72 + int(1.6 * sums * p.parts), 255)
        if not p.apart:
            alive = p.parts + max(p.extras, self._beside(p))
            return 40 + min(int(1.1 * sums * alive), 160) + old // 2
        unpacked = 60 + 2 * max(c["n"] // c["warps"] - 16, 0) + p.apart.tile_registers + c["m"] // 128 * old
        return min(unpacked + sums * (p.parts + 1) + (20 + old) * (p.parts - 1), 255)
