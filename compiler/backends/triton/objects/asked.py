"""The work of loops in Triton's IR with layouts: the FLOPs of their dots, and how their operands are loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod


class AskedLoop:
    """The work of a loop in the IR: FLOPs of its dots, and how the compiler implements its loads. trips: how often it
    runs; 0 if that is not known at compile time."""

    def __init__(self, text: str, trips: int = 0) -> None:
        shapes = list(
            map(_dot_shape, re.findall(r"(?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma(?:_scaled)?) .*", text))
        )
        self.flops = sum(2.0 * prod(shape) for shape in shapes)
        self.products = len(shapes)
        self.tile = min(((rows, columns) for *_, rows, _, columns in shapes), key=prod, default=(0, 0))
        self.trips = trips
        self.commits = text.count("ttg.async_commit_group")
        self.conversions = text.count("ttg.convert_layout")
        self.scaled = text.count("ttng.tc_gen5_mma_scaled")
        # 4-bit floats lie 8 bytes apart in shared memory, so they are copied 8 bytes at a time
        self.widest = "(64|128)" if "= e2m1" in text else "128"

    @staticmethod
    def whole(loops: Sequence[AskedLoop], ttgir: str, left: int) -> AskedLoop:
        """A whole kernel with these loops, of which `left` are still loops in the machine code. Its FLOPs are infinite
        if it is not known how often one runs."""
        found = AskedLoop(ttgir)
        found.flops += sum((loop.trips - 1) * loop.flops for loop in loops)
        if left or not all(loop.trips for loop in loops):
            found.flops = float("inf")
        return found


def _dot_shape(line: str) -> list[int]:
    """[.., M, K, N] of a dot, whose operands are the first two shapes of the line's types."""
    types = line.partition(" : ")[2]
    shapes = [list(map(int, dims.rstrip("x").split("x"))) for dims in re.findall(r"<((?:\d+x)+)", types)]
    *lead, rows, depth = shapes[0]
    return [*lead, rows, max(depth, shapes[1][-2]), shapes[1][-1]]  # one operand may be packed; the other tells K


def asked_loops(ttgir: str) -> list[AskedLoop]:
    """The work of each loop with dots, without its inner loops, in order."""
    return [found for text, trips in _loop_texts(ttgir) if (found := AskedLoop(text, trips)).flops]


def _loop_texts(ttgir: str) -> Iterable[tuple[str, int]]:
    """The text of each loop without its inner loops, and how often it runs; 0 if that is not known."""
    open_loops: list[tuple[int, int, list[str]]] = []
    found: list[tuple[int, list[str]]] = []
    for line in ttgir.splitlines():
        depth = len(line) - len(line.lstrip())
        if open_loops and depth == open_loops[-1][0] and line.lstrip().startswith("}") and " do " not in line:
            open_loops.pop()
        elif "scf.for" in line or "scf.while" in line:
            bounds = re.search(r"= %c(\d+)_\w+ to %c(\d+)_\w+ step %c(\d+)_", line)
            first, end, step = map(int, bounds.groups()) if bounds else (0, 0, 1)
            lines: list[str] = []
            open_loops.append((depth, len(found), lines))
            found.append((max(-(-(end - first) // step), 0), lines))
        elif open_loops:
            open_loops[-1][2].append(line)
    return (("\n".join(lines), trips) for trips, lines in found)
