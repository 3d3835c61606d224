"""Reads the assembly of AMD kernels: what loops with matrix instructions do, and whether stores have completed before
a program signals them to others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from ...errors import KernelRefused
from .asked import AskedLoop, asked_loops
from .loops import BARRIERS, MatrixLoop

_MEMORY = r"(?:global|buffer|flat)_"
_STORE = re.compile(rf"{_MEMORY}store")
_ATOMIC = re.compile(rf"{_MEMORY}atomic")
# by generation: stores are counted with loads, separately, or under a name of their own
_WAITED = re.compile(
    r"s_waitcnt\b.*\bvmcnt\(0\)|s_waitcnt_vscnt\s+null,\s*0x0\b|s_wait_(?:loadcnt_)?storecnt\w*\s+0x0\b"
)


def unfinished_stores(assembly: str) -> tuple[int, ...]:
    """Lines, from 1, of barriers with a preceding store that is not waited for and a following atomic that signals it.

    The check assumes that instructions run in the order of the text, masked stores included.
    """
    found: list[int] = []
    stored, barrier = False, 0
    for number, line in enumerate(assembly.splitlines(), 1):
        text = line.split(";")[0].strip()
        if _STORE.match(text):
            stored = True
        elif _WAITED.match(text):
            stored = False
        elif text.startswith("s_barrier") and not text.startswith("s_barrier_wait"):
            barrier = number if stored else 0
        elif _ATOMIC.match(text) and barrier:
            found.append(barrier)
            barrier = 0
    return tuple(found)


def check_stores(assembly: str) -> None:
    """Raise KernelRefused for a kernel that signals stores which may not have completed."""
    if lines := unfinished_stores(assembly):
        raise KernelRefused(
            f"{len(lines)} barriers do not wait for what was stored before others are told of it",
            "this version of Triton orders instructions in another way; please report it",
        )


_MATRIX = re.compile(r"v_(mfma|wmma)(?:_scale)?_\w+?_(\d+)x(\d+)x(\d+)")
_MATRIX_ANYWHERE = re.compile(rf"^\s*{_MATRIX.pattern}", re.M)
_FLOAT32 = re.compile(r"tt\.dot .*: tensor<[\dx]+xf32")  # which no matrix instruction takes as it is
_BLOCK = re.compile(r"(?:\.L(BB\w+)|; %bb\.\d+):")
_LOAD = re.compile(r"(?:global|buffer)_load_")


def matrix_loops(assembly: str, ttgir: str, warps: int) -> tuple[MatrixLoop, ...]:
    """The loops with MFMA or WMMA of a kernel and of the IR that it was made of, in their order; none where the two do
    not have the same loops. KernelRefused for a kernel that multiplies matrices without such instructions.

    Values go from global memory through registers to shared memory: those loads count as copies, and no store does.
    """
    asked = asked_loops(ttgir)
    loops = [loop for loop in _loops(assembly) if any(map(_MATRIX.match, loop))]
    if asked and not loops and not _MATRIX_ANYWHERE.search(assembly) and not _FLOAT32.search(ttgir):
        raise KernelRefused("multiplies without matrix instructions", "this is a gap in icc; please report it")
    if len(loops) != len(asked):
        return ()
    return tuple(_facts(loop, source, warps) for loop, source in zip(loops, asked, strict=True))


def _loops(assembly: str) -> list[list[str]]:
    """The instructions of each loop, without the loops in it, by what LLVM says of each block."""
    loops: dict[str, list[str]] = {}
    header = ""
    for line in assembly.splitlines():
        if block := _BLOCK.match(line):
            inside = re.search(r"in Loop: Header=(BB\w+)", line)
            header = inside[1] if inside else block[1] if "Loop Header" in line else ""
        elif header and (text := line.split(";")[0].strip()):
            loops.setdefault(header, []).append(text)
    return list(loops.values())


def _facts(loop: Sequence[str], asked: AskedLoop, warps: int) -> MatrixLoop:
    matrix = [found for line in loop if (found := _MATRIX.match(line))]
    done = sum(2.0 * prod(map(int, found.groups()[1:])) * warps for found in matrix)
    loads = [line for line in loop if _LOAD.match(line)]
    barriers = sum(bool(re.match(r"s_barrier(?:_wait)?\b", line)) for line in loop)
    steps = max(barriers // BARRIERS, 1)  # LLVM unrolls short loops
    wide = [line for line in loads if re.match(r"\w+_(?:dwordx4|b128)\b", line)]
    return MatrixLoop(
        instruction=matrix[0][1].upper(),
        steps=steps,
        flops=done / (asked.flops * steps),
        barriers=barriers,
        shared_stores=0,
        local=sum(line.startswith("scratch_") for line in loop),
        conversions=asked.conversions,
        loads=0,
        copies=len(loads),
        narrow=len(loads) - len(wide),
        waits_each=False,
        instructions=len(loop),
        tile=asked.tile,
    )
