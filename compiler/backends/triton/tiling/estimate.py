"""An estimate of the cost of a tiling of a product.

It is a roofline per resource: memory, the second-level cache, matrix units, instruction issue, and the
latency of the steps that one program takes in turn. Constants were fitted to the tilings of 172 products (bf16, 4 and 8
bits, 1 to 8,192 rows) timed on an H100: benchmarks/NOTES.md says how well they choose. `icc tune` replaces the choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from .choice import Config, power_of_two
from .machine import INLINE, LATENCY, LAUNCH, Machine, merges
from .product import ProductFacts, Work

STREAMED = 0.93  # share of the bandwidth if tiles are loaded ahead of their products
CACHE_PER_SM = 94e9  # bytes/s that a multiprocessor reads from the second-level cache
SPLIT = 2.4e-6  # seconds of a kernel that adds up the sums of splits of K
MERGE = 2 * LATENCY  # seconds until a program knows that it ends last and has read the others' sums
SPLIT_PER_SM = 31e9  # bytes/s of these sums that a multiprocessor writes and reads again
WARP_SUM = 0.34e-6  # seconds per warp beyond four of a decode kernel of eight rows, whose warps add up their sums
ISSUE_PER_SM = 3.8e9  # instructions of a warp per second: four schedulers at 60 %
FEW = 8.0  # instructions per value and row of a kernel for few rows in float32, besides those that unpack the code


@dataclass(frozen=True)
class Estimate:
    """Seconds of tilings on one machine. held: the most programs that a multiprocessor holds; 0: as many as fit."""

    machine: Machine
    held: int = 0

    def seconds(self, p: ProductFacts, c: Config) -> float:
        """Estimated seconds; infinity if the tiling does not fit."""
        if p.few and c["decode"]:
            return self._few_seconds(p)
        resident = self._resident(p, c)
        if not resident:
            return inf
        sms = self.machine.target.multiprocessors
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
        cache = programs * slab * (c["n"] * weight + min(c["m"], p.rows) * min(p.mode.item, 2))
        target = self.machine.target
        peak = target.roofline(eight=p.mode.eight)
        share = p.mode.rate(self.machine, p, c, min(resident, busiest))
        reached = target.roofline(p.mode.eight, share, STREAMED)
        flops = 2.0 * busiest * c["m"] * c["n"] * p.parts * slab
        each = p.mode.instructions(self.machine, p, c)
        bounds = [
            reached.memory_seconds(memory + 2 * p.k * p.rows),
            cache / (CACHE_PER_SM * sms),
            reached.arithmetic_seconds(flops * sms),
            busiest * steps * each / ISSUE_PER_SM,
            waves * (steps / max(c["stages"] - 1, 1) + 1) * LATENCY,
        ]
        work = Work(waves, steps, each, peak.arithmetic_seconds(flops / busiest / steps * sms))
        bounds = p.mode.bounds(bounds, work, c)
        extra = LAUNCH + (WARP_SUM * (c["warps"] - 4) * c["m"] / 8 if c["decode"] else 0.0)
        codes_rows = p.mode.eight and not p.coded
        if codes_rows and c["decode"] and p.rows <= INLINE:  # each program first finds the largest value of a row
            extra += 2 * LATENCY
        elif codes_rows:  # the kernel that quantizes rows to 8 bits
            extra += LAUNCH + LATENCY + self.machine.read.memory_seconds(3.0 * p.rows * p.k)
        if c["splits"] > 1:
            sums = 4.0 * c["splits"] * p.parts
            if merges(c["m"], c["splits"], tiles_n * tiles_m):
                extra += MERGE + sums * c["m"] * c["n"] * (tiles_n * tiles_m / (SPLIT_PER_SM * sms) + 1 / CACHE_PER_SM)
            else:
                extra += SPLIT + 2 * sums * p.rows * p.columns / (SPLIT_PER_SM * sms)
        if p.experts and not c["decode"]:
            extra += 2 * LAUNCH + 2 * LATENCY * (1 + slots / 1024)
        return extra + max(bounds) + 0.1 * sum(bounds)

    def _few_seconds(self, p: ProductFacts) -> float:
        """Estimated seconds of few rows in float32."""
        assert p.codes is not None
        active = min(p.rows * p.topk, p.experts) if p.experts else 1
        values = active * p.columns * p.parts * p.k
        issue = (
            values
            * (p.codes.decode_instructions + FEW * p.rows)
            / 32
            / (ISSUE_PER_SM * self.machine.target.multiprocessors)
        )
        return LAUNCH + LATENCY + max(self.machine.read.memory_seconds(active * p.matrix_bytes), issue)

    def _resident(self, p: ProductFacts, c: Config) -> int:
        """Programs that a multiprocessor holds at once; 0 if not even one fits."""
        fit = self.machine.target.shared_memory_kib * 1024 // max(self.shared_bytes(p, c), 1024)
        fit = min(fit, self.held or fit)
        lanes = self.machine.target.warp_size * c["warps"]
        if (
            self.machine.level >= 100 and c["n"] >= 64 and c["warps"] >= 4 and not c["decode"]
        ):  # columns of tensor memory
            columns = p.parts * (c["m"] + (64 if p.apart else 16 if p.mode.powers else 0))
            fit = min(fit, 512 // power_of_two(max(columns, 32)))
        return min(
            fit,
            self.machine.target.max_warps // c["warps"],
            max(int(self.machine.target.registers / (self.registers(p, c) * lanes)), 1),
        )

    def shared_bytes(self, p: ProductFacts, c: Config) -> int:
        """Estimated shared memory."""
        slices = c["warps"] if c["decode"] else 1
        row = p.mode.shared_row(p, c["k"])
        w = p.parts * c["n"] * row * slices
        x = c["m"] * c["k"] * p.mode.item * slices
        depth = max(c["stages"] - 1, 1)
        ahead = not c["decode"] and self.machine.level >= 90 and p.mode.runs_ahead  # a running step keeps its operands
        sums = (
            4 * p.parts * c["m"] * c["n"] * slices if c["decode"] else (4 if self.machine.hip else 2) * c["m"] * c["n"]
        )
        total = depth * (w + x) + (4096 if p.apart and c["n"] < 16 * c["warps"] else 0)
        if ahead:  # a running step keeps its operands
            total += x if p.apart else w + x
        return max(total, sums)

    def registers(self, p: ProductFacts, c: Config) -> int:
        """Estimated registers per thread, fitted to compiled kernels."""
        old = 40 if self.machine.level < 90 else 0  # all operands of a warp's instructions pass through registers
        if c["decode"]:
            if not p.codes:
                return 32 + c["n"] * p.parts // 2 + c["m"]
            return int((36 + 1.4 * c["n"] * p.parts) * (1 + (c["m"] - 8) / 32)) + p.codes.decode_registers + old
        sums = c["m"] * c["n"] // (self.machine.target.warp_size * c["warps"])
        if p.mode.whole(self.machine, p, c):
            return min(72 + int(1.6 * sums * p.parts), 255)
        if not p.apart:
            alive = p.parts + max(p.extras, p.mode.beside(self.machine, p))
            return 40 + min(int(1.1 * sums * alive), 160) + old // 2
        unpacked = 60 + 2 * max(c["n"] // c["warps"] - 16, 0) + p.apart.tile_registers + c["m"] // 128 * old
        return min(unpacked + sums * (p.parts + 1) + (20 + old) * (p.parts - 1), 255)
