"""Checks the loops of compiled products in the disassembly for faults that a device would only show as slowness.

A loop with matrix instructions is compared with the dots of the same loop in Triton's IR: the ratio of FLOPs done to
FLOPs asked for (above 1 if several warps compute the same rows), and what else the loop does per step: barriers, stores
to shared memory, local memory, loads that wait, copies of fewer than 16 bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ...errors import KernelRefused
from .asked import AskedLoop, asked_loops
from .sass import MATRIX, SassCode, SassLine, disassemble

BARRIERS = 2  # per step of a product: copies have arrived, copies may be overwritten
_NO_RESULT = {"ST", "STG", "STS", "STSM", "STL", "RED", "REDG", "LDGSTS", "BRA", "EXIT", "BAR", "WARPSYNC"}
_WARP_SHAPES = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8, "16832": 16 * 8 * 32, "16864": 16 * 8 * 64}


@dataclass(frozen=True)
class MatrixLoop:
    """One loop with matrix instructions, without the loops in it. All counts but `steps` and `flops` are per iteration,
    or for the whole kernel if the loop is fully unrolled.

    instruction: the matrix instruction, without its shape. steps: iterations of the source's loop per iteration of the
    machine's. flops: FLOPs of all warps' instructions over those of the source's dots. barriers: barriers of the whole
    block. shared_stores: stores of values by warps, without copies from global memory. local: accesses of local memory.
    conversions: conversions of layouts in Triton's IR. loads: loads from global memory into registers. copies:
    asynchronous copies from global to shared memory; narrow: those of fewer than 16 bytes (8 for floats of 4 bits).
    waits_each: whether every instruction of a warp group is waited for before the next begins. instructions:
    instructions of one warp. tile: rows and columns of the smallest product. scaled: products whose operands matrix
    units scale block by block.
    """

    instruction: str
    steps: int
    flops: float
    barriers: int
    shared_stores: int
    local: int
    conversions: int
    loads: int
    copies: int
    narrow: int
    waits_each: bool
    instructions: int
    tile: tuple[int, int] = (0, 0)
    scaled: int = 0


def matrix_loops(cubin: bytes, ttgir: str, warps: int) -> tuple[MatrixLoop, ...]:
    """The loops with matrix instructions of a cubin and the IR that it was made from, in order. If the two do not have
    the same loops, because short ones are unrolled, the whole kernel counts as one loop. CodegenError if the
    disassembler fails, KernelRefused for a kernel whose results depend on the speed of matrix units.
    """
    asked = asked_loops(ttgir)
    if not asked:
        return ()
    code = SassCode(disassemble(cubin))
    loops = [loop for loop in code.loops() if any(MATRIX.match(line.name) for line in loop)]
    unrolled = _overwritten(code.lines, again=False) if len(loops) != len(asked) else set()
    if registers := sorted(unrolled.union(*map(_overwritten, loops))):
        names = ", ".join(f"R{register}" for register in registers[:4])
        raise KernelRefused(
            f"matrix instructions may still read registers that are written: {names}",
            "this version of Triton orders instructions in another way; please report it",
        )
    if len(loops) == len(asked):
        return tuple(_facts(loop, code, source, warps) for loop, source in zip(loops, asked, strict=True))
    if not any(MATRIX.match(line.name) for line in code.lines):
        return ()  # of float32
    return (_facts(code.lines, code, AskedLoop.whole(asked, ttgir, len(loops)), warps),)


def longest_loop(cubin: bytes) -> int:
    """Instructions of one warp in a step of the longest innermost loop; 0 if the kernel has no loop."""
    return max(map(len, SassCode(disassemble(cubin)).loops(matrix=False)), default=0)


def loop_faults(entry: str, loops: Sequence[MatrixLoop], level: int = 0) -> tuple[str, ...]:
    """Avoidable costs in the loops of a kernel, in words; products are checked more strictly. level: the compute
    capability; 0: not known."""
    found: dict[str, None] = {}
    for loop in loops:
        if loop.flops > 1.05:
            found[f"computes {loop.flops:.2f} times what it multiplies"] = None
        if loop.waits_each:
            found[f"waits for each {loop.instruction} before the next"] = None
        if loop.local:
            found[f"{loop.local} accesses of local memory per step"] = None
        grouped = {9: ("HGMMA", "QGMMA", "IGMMA"), 10: ("UTC",), 11: ("UTC",)}.get(level // 10, ("",))
        if min(loop.tile) >= 64 and not loop.instruction.startswith(grouped):
            found[f"products of {loop.tile[0]} x {loop.tile[1]} by {loop.instruction}"] = None
        if not entry.startswith("linear_") or not loop.steps:
            continue
        if 2 * loop.narrow > loop.copies:
            found[f"{loop.narrow} of {loop.copies} copies of fewer than 16 bytes"] = None
        if loop.conversions:
            found[f"{loop.conversions} conversions of layouts per step"] = None
        if loop.shared_stores:
            found[f"{loop.shared_stores} stores to shared memory per step"] = None
        if loop.loads:
            found[f"{loop.loads} loads per step that are waited for"] = None
        # tensor memory is written between two barriers, for each part of W; with scales there are three for each
        most = BARRIERS + 2 * loop.instruction.startswith("UTC") + max(3 * loop.scaled - 2, 0)
        if loop.barriers > most * loop.steps:
            found[f"{loop.barriers} barriers per step"] = None
    return tuple(found)


def _facts(loop: Sequence[SassLine], code: SassCode, asked: AskedLoop, warps: int) -> MatrixLoop:
    names = Counter(line.name for line in loop if line.guard != "!PT")
    whole = loop is code.lines

    def count(pattern: str) -> int:
        return sum(n for name, n in names.items() if re.match(pattern, name))

    commits = count(r"LDGDEPBAR")
    steps = 0 if whole else max(round(commits / asked.commits), 1) if asked.commits else 1
    matrix = [line for line in loop if MATRIX.match(line.name)]
    waits_each = len(matrix) > asked.products * max(steps, 1) and _waits_each(loop)
    done = sum(_flops(line, code, warps) for line in matrix)
    return MatrixLoop(
        matrix[0].name.split(".")[0], steps, done / (asked.flops * (steps or 1)),
        count(r"BAR\.(SYNC|RED)|BAR$"), count(r"STS|STSM"), count(r"LDL|STL"), asked.conversions,
        count(r"LDG(\.|$)"), count(r"LDGSTS"), count(rf"LDGSTS(?!.*{asked.widest})"), waits_each,
        sum(names.values()), asked.tile, asked.scaled,
    )  # fmt: skip


def _waits_each(lines: Sequence[SassLine]) -> bool:
    """Whether no instruction of a warp group is issued while another runs: if ptxas cannot prove that their operands do
    not change, it waits after each of them, whatever waits the source has."""
    running = issued = False
    for line in lines:
        if line.name.startswith("WARPGROUP.DEPBAR"):
            running = running and int(line.operands.rpartition(" ")[2], 16) > 0
        elif re.match(r"[HIQ]GMMA", line.name):
            if running:
                return False
            running = issued = True
    return issued


def overwritten_registers(text: str) -> set[int]:
    """Registers that the loops of a disassembly write while matrix instructions may still read them."""
    return set().union(*map(_overwritten, SassCode(text).loops()))


def _overwritten(lines: Sequence[SassLine], again: bool = True) -> set[int]:
    """Registers of a loop that instructions of a warp group may still read as operands when others write them.

    These instructions run asynchronously; WARPGROUP.DEPBAR waits until at most a given number of them are running. The
    loop is walked twice, because instructions of one step may still run in the next. again: whether to walk it twice.
    """
    running: list[set[int]] = []
    found: set[int] = set()
    for line in [*lines, *lines] if again else lines:
        if line.name.startswith("WARPGROUP.DEPBAR"):
            left = int(line.operands.rpartition(" ")[2], 16)
            running = running[len(running) - left :] if left < len(running) else running
        elif re.match(r"[HIQ]GMMA", line.name):
            operand = re.fullmatch(r"R(\d+)(?:\.reuse)?", line.operands.split(", ")[1])
            first = int(operand[1]) if operand else 0
            running.append(set(range(first, first + 4)) if operand else set())
        else:
            found.update(*(_written(line) & read for read in running))
    return found


def _written(line: SassLine) -> set[int]:
    """The registers of the one result that an instruction writes."""
    kind, *modifiers = line.name.split(".")
    result = re.match(r"R(\d+)", line.operands)
    if result is None or kind in _NO_RESULT:
        return set()
    wide = {"128": 4, "64": 2, "WIDE": 2, **({"4": 4, "2": 2} if kind == "LDSM" else {})}
    count = max((wide.get(modifier, 1) for modifier in modifiers), default=1)
    return set(range(int(result[1]), int(result[1]) + count))


def _flops(line: SassLine, code: SassCode, warps: int) -> float:
    """FLOPs of one instruction, summed over all warps of a block."""
    kind, _, rest = line.name.partition(".")
    if kind.startswith("UTC"):  # issued once; its shape is in a descriptor: N / 8 from bit 17, M / 16 from bit 24
        register = re.search(r"idesc\[(\w+)\]", line.operands)
        word = code.descriptor(register[1], line) if register else 0
        return 2.0 * (word >> 17 & 63) * 8 * (word >> 24 & 31) * 16 * (16 if kind == "UTCHMMA" else 32)
    if found := re.match(r"(\d+)x(\d+)x(\d+)", rest):  # of a warp group
        return 2.0 * prod(map(int, found.groups())) * warps / 4
    return 2.0 * _WARP_SHAPES[rest.split(".")[0]] * warps
