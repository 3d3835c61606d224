"""Runs whole kernels as compiled by Triton, without a GPU: the PTX of all programs of a launch, in lockstep.

The interpreter does not show the work of Triton's compiler: layouts, swizzles, vectors, asynchronous copies. Here every
access of global memory must lie in the memory of one argument and at a multiple of its width, every access of shared
memory in the kernel's own, and results can be compared. This models the PTX ISA, 8.x, but not the work of ptxas. An
asynchronous copy completes when it is waited for, or at once (`Machine.late`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ptx_instructions import VALUES, number
from ptx_matrix import fragment_product, group_product, load_matrix, store_matrix

ARGUMENT = 40  # each argument's memory begins at a multiple of 2**ARGUMENT
SHARED_AT = 1024  # where a kernel's shared memory begins; the driver owns the bytes before
Lanes = np.ndarray
_ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, new: old + new, "max": max, "min": min, "exch": lambda _, new: new,
    "or": lambda old, new: old | new,
}  # fmt: skip


class Fault(Exception):
    """An access outside allowed memory, or not at a multiple of its width."""


@dataclass(frozen=True)
class Line:
    """One instruction. guard: the predicate's name, after ! if it is negated."""

    name: str
    operands: tuple[str, ...]
    guard: str
    text: str


def parse(text: str) -> tuple[list[Line], dict[str, int]]:
    """The instructions of the only kernel in a PTX file, and the index of each label."""
    body = text[text.index(".reqntid") :].split("{", 1)[1].rpartition("}")[0]
    body = re.sub(r"//[^\n]*", "", body)
    lines: list[Line] = []
    labels: dict[str, int] = {}
    # blocks of inline PTX have their own registers: their names get the block's number
    parts, scope = re.split(r"(\n\s*\{(?=[\s.])|\n\s*\}\s*(?=\n|$))", body), 0
    inside = False
    for part in parts:
        if part.strip() in ("{", "}"):
            inside = part.strip() == "{"
            scope += inside
            continue
        own = set(re.findall(r"\.reg\s+\.\w+\s+([^;]+);", part)) if inside else set()
        names = {re.sub(r"<\d+>", "", name.strip()) for found in own for name in found.split(",")}
        for statement in re.sub(r":[ \t]*\n", ":;", part).split(";"):
            _statement(" ".join(statement.split()), names, scope, lines, labels)
    return lines, labels


def _statement(text: str, own: set[str], scope: int, lines: list[Line], labels: dict[str, int]) -> None:
    text = text.strip("{} ") if text.strip("{} ") == "" or text.startswith(("{ @", "{ .")) else text
    if not text or text.startswith("."):
        return
    if text.endswith(":"):
        labels[text[:-1]] = len(lines)
        return
    guard = ""
    if text.startswith("@"):
        guard, text = text[1:].split(None, 1)
    name, _, rest = text.partition(" ")
    operands = [part.strip() for part in re.split(r",(?![^{]*\})(?![^\[]*\])", rest)] if rest else []

    def scoped(word: str) -> str:
        return re.sub(r"(?<![%\w])([A-Za-z_]\w*)", lambda m: _own(m[1], own, scope), word)

    lines.append(Line(name, tuple(map(scoped, operands)), scoped(guard), text))


def _own(word: str, own: set[str], scope: int) -> str:
    return f"{word}@{scope}" if word in own or word.rstrip("0123456789") in own else word


@dataclass
class Machine:
    """All programs of a launch. late: whether asynchronous copies complete only when they are waited for. skewed:
    whether warps run one after the other from barrier to barrier, the last one first, instead of in lockstep."""

    text: str
    threads: int
    shared_bytes: int
    grid: tuple[int, int, int]
    args: Sequence[torch.Tensor | int]
    late: bool = True
    skewed: bool = False
    registers: dict[str, Lanes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lines, self.labels = parse(self.text)
        self.blocks = int(np.prod(self.grid))
        self.count = self.blocks * self.threads
        lane = np.arange(self.count)
        self.block, self.thread = lane // self.threads, lane % self.threads
        self.shared = np.full((self.blocks, SHARED_AT + self.shared_bytes), 255, np.uint8)
        self.memory = [
            np.empty(0, np.uint8) if isinstance(arg, int) else _bytes(arg) for arg in self.args
        ]  # fmt: skip
        x, y, _ = self.grid
        self.special = {
            "%tid.x": self.thread, "%tid.y": 0 * lane, "%tid.z": 0 * lane, "%ctaid.x": self.block % x,
            "%ctaid.y": self.block // x % y, "%ctaid.z": self.block // (x * y), "%laneid": self.thread % 32,
            "%ntid.x": lane * 0 + self.threads, "global_smem": lane * 0 + SHARED_AT,
            **{f"%nctaid.{axis}": lane * 0 + size for axis, size in zip("xyz", self.grid, strict=True)},
        }  # fmt: skip
        self.waiting: list[list[Callable[[], None]]] = [[]]
        self.steps = [getattr(self, "_" + line.name.split(".")[0], None) or self._value for line in self.lines]

    def run(self) -> None:
        """Run all threads to their end."""
        at = np.zeros(self.count, np.int64)
        self.stopped = np.zeros(self.count, bool)  # waits at a barrier
        end = len(self.lines)
        warp = self.thread // 32
        with np.errstate(all="ignore"):
            while True:
                running = (at < end) & ~self.stopped
                if not running.any():
                    if not self.stopped.any():
                        return
                    self.stopped[:] = False
                    continue
                if self.skewed:
                    running &= warp == warp[running].max()
                here = int(at[running].min())
                self.active = running & (at == here)
                # continue until other threads wait at the next instruction
                others = at[running & ~self.active]
                stop = int(others.min()) if len(others) else end
                self.full = bool(self.active.all())
                while True:
                    line = self.lines[here]
                    target = self._execute(here, line)
                    if target is not None:
                        at[self.active] = here + 1
                        at[target[0]] = target[1]
                        break
                    here += 1
                    if here >= stop or self.stopped[self.active].any():
                        at[self.active] = here
                        break

    def _execute(self, here: int, line: Line) -> tuple[Lanes, int] | None:
        try:
            mask = self.active
            if line.guard:
                held = self.registers[line.guard.lstrip("!")]
                mask = mask & (~held if line.guard[0] == "!" else held)
            if line.name.startswith("bra"):
                return mask, self.labels[line.operands[0]]
            if line.name in ("ret", "exit"):
                return mask, len(self.lines)
            self.mask = mask
            if mask.any():
                self.steps[here](line)
        except (Fault, KeyError, ValueError, IndexError) as error:
            raise Fault(f"{line.text}: {type(error).__name__} {error}") from error
        return None

    # operands

    def get(self, name: str, kind: str) -> Lanes:
        """An operand as numbers of a PTX type: u32, s64, f32 and so on; b types are unsigned."""
        wanted = VALUES[kind]
        if name in self.special:
            return self.special[name].astype(wanted)
        if name[0] in "-0123456789":
            return np.full(self.count, number(name, kind), wanted)
        value = self.registers.get(name)
        if value is None:  # undefined, so without effect
            return np.full(self.count, -1, f"i{np.dtype(wanted).itemsize}").view(wanted)
        if value.dtype == wanted:
            return value
        if value.dtype.itemsize == np.dtype(wanted).itemsize:
            return value.view(wanted)
        return value.astype(f"u{np.dtype(wanted).itemsize}").view(wanted)

    def put(self, name: str, value: Lanes) -> None:
        if name == "_":
            return
        if value.dtype != np.bool_:
            value = value.view(f"u{value.dtype.itemsize}")
        if not self.mask.all():
            old = self.registers.get(name)
            value = np.where(self.mask, value, np.zeros_like(value) if old is None else old.astype(value.dtype))
        self.registers[name] = value

    def vector(self, text: str) -> list[str]:
        return [part.strip() for part in text.strip("{} ").split(",")]

    def place(self, text: str) -> Lanes:
        """The address that a memory operand names."""
        base, _, offset = text.strip("[] ").replace(" ", "").partition("+")
        return self.get(base, "u64") + np.uint64(int(offset or 0))

    # instructions

    def _value(self, line: Line) -> None:
        from ptx_instructions import compute

        compute(self, line)

    def _nothing(self, line: Line) -> None: ...

    _fence = _membar = _griddepcontrol = _nothing
    _createpolicy = _nanosleep = _nothing

    def _wgmma(self, line: Line) -> None:
        if line.name.startswith("wgmma.mma_async"):
            group_product(self, line)

    def _mma(self, line: Line) -> None:
        fragment_product(self, line)

    def _ldmatrix(self, line: Line) -> None:
        load_matrix(self, line)

    def _stmatrix(self, line: Line) -> None:
        store_matrix(self, line)

    def _bar(self, line: Line) -> None:
        self.stopped |= self.mask

    _barrier = _bar

    def _shfl(self, line: Line) -> None:
        result, value, by, *_ = line.operands
        kind = line.name.split(".")[2]
        lane = self.thread % 32
        amount = self.get(by, "s32")
        other = {"bfly": lane ^ amount, "idx": amount, "up": lane - amount, "down": lane + amount}[kind]
        inside = (other >= 0) & (other < 32)
        source = np.arange(self.count) - lane + np.where(inside, other, lane)
        self.put(result.partition("|")[0], self.get(value, "b32")[source])

    def _ld(self, line: Line) -> None:
        parts = line.name.split(".")
        kind = parts[-1]
        if parts[1] == "param":
            which = int(re.search(r"_param_(\d+)", line.operands[1])[1])  # type: ignore[index]
            arg = self.args[which] if which < len(self.args) else 0
            base = arg if isinstance(arg, int) else (which + 1 << ARGUMENT) + arg.data_ptr() % 4096
            self.put(line.operands[0], np.full(self.count, base & (1 << 64) - 1, np.uint64).astype(VALUES[kind]))
            return
        names = self.vector(line.operands[0])
        size = np.dtype(VALUES[kind]).itemsize
        data = self.read(parts[1], self.place(line.operands[1]), size * len(names), self.mask)
        for name, value in zip(names, data.view(VALUES["b" + kind[1:]]).T, strict=True):
            wide = 4 if name.startswith("%r") and not name.startswith(("%rs", "%rd")) else 8 if "%rd" in name else 2
            value = np.ascontiguousarray(value)
            if kind[0] == "s":
                value = value.view(VALUES[kind]).astype(f"i{max(wide, size)}")
            self.put(name, value.astype(f"u{max(wide, size)}") if kind[0] != "s" else value)

    def _st(self, line: Line) -> None:
        parts = line.name.split(".")
        kind = "b" + parts[-1][1:]
        values = [self.get(name, kind) for name in self.vector(line.operands[1])]
        data = np.stack(values, 1).view(np.uint8)
        self.write(parts[1], self.place(line.operands[0]), data, self.mask)

    def _cp(self, line: Line) -> None:
        if line.name == "cp.async.commit_group":
            self.waiting.append([])
        elif line.name.startswith("cp.async.wait"):
            keep = 0 if line.name.endswith("all") else int(line.operands[0])
            ready = len(self.waiting) - 1 - keep if keep or "all" not in line.name else len(self.waiting)
            for group in self.waiting[: max(ready, 0)]:
                for land in group:
                    land()
            del self.waiting[: max(ready, 0)]
            self.waiting = self.waiting or [[]]
        else:
            self._copy(line)

    def _copy(self, line: Line) -> None:
        size = int(line.operands[2], 0)
        wanted = self.get(line.operands[3], "u32") if len(line.operands) > 3 else np.full(self.count, size, np.uint32)
        if not np.isin(wanted[self.mask], (0, size)).all():
            raise Fault("a copy of a part")
        place, source, mask = self.place(line.operands[0]), self.place(line.operands[1]), self.mask.copy()
        data = np.zeros((self.count, size), np.uint8)
        read = mask & (wanted > 0)
        data[read] = self.read("global", source, size, read)[read]

        def land() -> None:
            self.write("shared", place, data, mask)

        land() if not self.late else self.waiting[-1].append(land)

    def _atom(self, line: Line) -> None:
        """An atomic operation on integers in global memory, one thread after the other."""
        operation = next(part for part in line.name.split(".") if part in ("add", "max", "min", "exch", "cas", "or"))
        kind = line.name.split(".")[-1]
        place, value = self.place(line.operands[1]), self.get(line.operands[2], kind)
        found = np.zeros(self.count, VALUES[kind])
        for lane in np.flatnonzero(self.mask):
            one = np.zeros(self.count, bool)
            one[lane] = True
            size = value.dtype.itemsize
            found[lane] = self.read("global", place, size, one)[lane].view(VALUES[kind])[0]
            old, new = found[lane], value[lane]
            result = _ATOMIC[operation](old, new)
            data = np.zeros((self.count, size), np.uint8)
            data[lane] = np.array([result], VALUES[kind]).view(np.uint8)
            self.write("global", place, data, one)
        self.put(line.operands[0], found)

    # memory

    def read(self, space: str, place: Lanes, size: int, mask: Lanes) -> Lanes:
        """The bytes [lanes, size] at these addresses; zeros for masked lanes."""
        found = np.zeros((self.count, size), np.uint8)
        for memory, at, lanes in self._found(space, place, size, mask):
            spots = at[:, None] + np.arange(size)
            found[lanes] = memory[self.block[lanes][:, None], spots] if memory.ndim == 2 else memory[spots]
        return found

    def write(self, space: str, place: Lanes, data: Lanes, mask: Lanes) -> None:
        size = data.shape[1]
        for memory, at, lanes in self._found(space, place, size, mask):
            spots = at[:, None] + np.arange(size)
            if memory.ndim == 2:
                memory[self.block[lanes][:, None], spots] = data[lanes]
            else:
                memory[spots] = data[lanes]

    def _found(self, space: str, place: Lanes, size: int, mask: Lanes) -> list[tuple[np.ndarray, Lanes, Lanes]]:
        """For each memory that is accessed: its bytes, the offsets in it, and the lanes. Raises Fault."""
        lanes = np.flatnonzero(mask)
        at = place[lanes].astype(np.int64)
        if (at % size).any():
            raise Fault(f"{space} access of {size} bytes at {int(at[at % size != 0][0]):#x}")
        if space.startswith("shared"):
            if len(at) and (at.min() < SHARED_AT or at.max() + size > self.shared.shape[1]):
                raise Fault(f"shared access of {size} bytes at {at.min()} to {at.max()} of {self.shared.shape[1]}")
            return [(self.shared, at, lanes)]
        found = []
        owner = at >> ARGUMENT
        for which in np.unique(owner):
            own = owner == which
            arg = self.args[which - 1] if 0 < which <= len(self.args) else 0
            if isinstance(arg, int):
                raise Fault(f"global access of {size} bytes at {int(at[own][0]):#x}, which is no argument's")
            memory = self.memory[which - 1]
            first = at[own] - (int(which) << ARGUMENT) - arg.data_ptr() % 4096 + _before(arg)
            if first.min() < 0 or first.max() + size > len(memory):
                raise Fault(
                    f"access of {size} bytes of argument {which - 1} at {first.min()} to {first.max()} of "
                    f"{len(memory)}; first lane {lanes[own][np.argmax((first < 0) | (first + size > len(memory)))]}"
                )
            found.append((memory, first, lanes[own]))
        return found


def _before(arg: torch.Tensor) -> int:
    """The number of bytes of a tensor's storage before it."""
    return arg.data_ptr() - arg.untyped_storage().data_ptr()


def _bytes(arg: torch.Tensor) -> np.ndarray:
    """All bytes of a tensor's storage, uint8."""
    storage = arg.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).numpy()  # type: ignore[arg-type]


__all__ = ["Fault", "Line", "Machine"]
