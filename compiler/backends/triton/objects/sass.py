"""The machine code of CUDA kernels as text: its instructions, blocks and loops."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import CodegenError

_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.M)
_LABEL = re.compile(r"^(\.L_\w+):", re.M)
MATRIX = re.compile(r"(?:[HIQ]G?MMA|UTC[HQI]MMA)\b")


def disassemble(cubin: bytes) -> str:
    """The text of nvdisasm, which comes with Triton. CodegenError if Triton is not installed or nvdisasm fails."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        raise CodegenError("Triton is not installed")
    tool = Path(found.origin).with_name("backends") / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True)
    if done.returncode:
        raise CodegenError(f"nvdisasm: {done.stderr.strip()[:300]}")
    return done.stdout


@dataclass(frozen=True)
class SassLine:
    """One instruction: its predicate, name with modifiers, and the rest."""

    guard: str
    name: str
    operands: str


class SassCode:
    """The instructions of a kernel and its natural loops."""

    def __init__(self, text: str) -> None:
        self.lines: list[SassLine] = []
        self._labels: dict[str, int] = {}
        for line in text.splitlines():
            if label := _LABEL.match(line):
                self._labels[label[1]] = len(self.lines)
            elif found := _LINE.match(line):
                self.lines.append(SassLine(found[1] or "", found[2], found[3]))

    def loops(self, matrix: bool = True) -> list[list[SassLine]]:
        """Natural loops, by their first instruction: those with matrix instructions of their own, or, if not `matrix`,
        the innermost ones. Each is given without its inner loops."""
        starts, successors = self._blocks()
        ends = [*starts[1:], len(self.lines)]
        spans = zip(starts, ends, strict=True)
        has = [any(MATRIX.match(line.name) for line in self.lines[a:b]) for a, b in spans]
        bodies: dict[int, set[int]] = {}
        dominators = _dominators(successors)
        for block, following in enumerate(successors):
            for head in following:
                if head in dominators[block]:
                    bodies.setdefault(head, {head}).update(_body(head, block, successors))
        found = [body for _, body in sorted(bodies.items())]
        own = [body.difference(*(other for other in found if other < body)) for body in found]
        if matrix:
            kept = [body for body in own if any(has[b] for b in body)]
        else:
            kept = [body for body, mine in zip(found, own, strict=True) if body == mine]
        return [[line for b in sorted(body) for line in self.lines[starts[b] : ends[b]]] for body in kept]

    def always_behind(self, first: str, later: re.Pattern[str]) -> bool:
        """Whether every path to an instruction whose name matches `later` passes an instruction named `first` without a
        predicate."""
        starts, successors = self._blocks()
        ends = [*starts[1:], len(self.lines)]
        reached, waiting = {0}, [0]  # blocks that are reached without it
        while waiting:
            block = waiting.pop()
            for line in self.lines[starts[block] : ends[block]]:
                if line.name == first and not line.guard:
                    break
                if later.match(line.name):
                    return False
            else:
                waiting += (new := set(successors[block]) - reached)
                reached |= new
        return True

    def descriptor(self, register: str, user: SassLine) -> int:
        """The last constant that a uniform register is set to before its use; 0 if it is set to none."""
        at = next((i for i, line in enumerate(self.lines) if line is user), 0)
        for line in reversed(self.lines[:at]):
            found = re.fullmatch(rf"{register}, (0x[0-9a-f]+)", line.operands)
            if line.name == "UMOV" and found and int(found[1], 16) >> 16:
                return int(found[1], 16)
        return 0

    def _blocks(self) -> tuple[list[int], list[list[int]]]:
        """The beginnings of basic blocks, and the successors of each."""
        leaders = {0, *self._labels.values()}
        leaders |= {i + 1 for i, line in enumerate(self.lines) if line.name.split(".")[0] in ("BRA", "EXIT")}
        starts = sorted(i for i in leaders if i < len(self.lines))
        number = {start: i for i, start in enumerate(starts)}
        successors: list[list[int]] = []
        for _, end in zip(starts, [*starts[1:], len(self.lines)], strict=True):
            last, following = self.lines[end - 1], []
            branches, ends = last.name.startswith("BRA"), last.name == "EXIT"
            if branches and (target := re.search(r"`\((\.L_\w+)\)", last.operands)):
                following.append(number[self._labels[target[1]]])
            always = not last.guard and not re.match(r"[!~]?U?[PR]", last.operands)
            if end < len(self.lines) and not ((branches or ends) and always):
                following.append(number[end])
            successors.append(following)
        return starts, successors


def _dominators(successors: Sequence[Sequence[int]]) -> list[set[int]]:
    """For each block its dominators: the blocks on every path to it, itself included."""
    before: list[list[int]] = [[] for _ in successors]
    for block, following in enumerate(successors):
        for other in following:
            before[other].append(block)
    found = [{0}, *(set(range(len(successors))) for _ in successors[1:])]
    changed = True
    while changed:
        changed = False
        for block in range(1, len(successors)):
            paths = [found[other] for other in before[block]]
            new = {block} | (set.intersection(*paths) if paths else set())
            changed |= new != found[block]
            found[block] = new
    return found


def _body(head: int, tail: int, successors: Sequence[Sequence[int]]) -> set[int]:
    """The blocks from which `tail` is reached without `head`."""
    body, waiting = {head}, [tail]
    while waiting:
        block = waiting.pop()
        if block not in body:
            body.add(block)
            waiting += [other for other, following in enumerate(successors) if block in following]
    return body
