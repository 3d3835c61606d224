"""Proves from a kernel's IR that every access lies in its buffer and that no index overflows 32 bits.

Each integer of the kernel is a linear form (forms.py). Program numbers and sizes of the batch are known; positions in a
block, counters of loops and numbers read from memory are unknowns with bounds. A mask, and the branch conditions on the
way to an access, are facts that hold there. What cannot be proved is reported in words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from .forms import Form, lower, upper
from .readers import READERS
from .ttir import TtirBlock, TtirFunction, TtirOp
from .values import KernelValues, Memory, Samples, UnclearError, View, joined, whole_range

_PASSES = 4  # times that a loop is walked before its carried values are assumed to be any number
_ENDS = ("tt.load", "scf.for", "scf.while", "scf.if", "tt.reduce", "tt.scan")  # ops whose results are unknown numbers
_GROWING = ("arith.addi", "arith.subi", "arith.muli", "arith.shli", "arith.trunci")


class IndexFault(str):
    """The report of an index that may overflow its bits, so that any memory may be read or written through it."""

    __slots__ = ()


def address_faults(function: TtirFunction, memory: Mapping[int, Memory], samples: Samples) -> tuple[str, ...]:
    """What cannot be proved, in words: accesses that may lie outside their buffers, and integers that may overflow
    their type (IndexFault). Empty if everything is proved.

    memory: the buffers that the kernel's pointers point to, by the number of the argument. samples: the programs to
    examine.
    """
    walk = _Walk(function, memory, samples)
    walk.blocks(function.blocks, ())
    return tuple(walk.faults)


class _Walk:
    def __init__(self, function: TtirFunction, memory: Mapping[int, Memory], samples: Samples) -> None:
        self.faults: dict[str, None] = {}
        self._memory, self._values = memory, KernelValues(function, memory, samples, READERS)
        self._quiet = 0  # while a loop is analysed for the values that it carries

    def blocks(self, blocks: Sequence[TtirBlock], facts: tuple[Form, ...]) -> TtirOp | None:
        """Walk the blocks of a region, at whose beginning `facts` hold. Returns its last operation; None if it has
        none."""
        reached: dict[str, list[tuple[Form, ...]]] = {}
        last = None
        for block in blocks:
            ways = reached.get(block.label)
            here = facts + (ways[0] if ways and len(ways) == 1 else ())
            for name, kind in block.arguments:
                self._values.types.setdefault(name, kind)
            for op in block.ops:
                self._visit(op, here)
                last = op
            if last is not None and last.name.startswith("cf."):
                for label, more in self._jumps(last):
                    reached.setdefault(label, []).append(here[len(facts) :] + more)
        return last

    def _jumps(self, op: TtirOp) -> Iterator[tuple[str, tuple[Form, ...]]]:
        labels = re.findall(r"\^\w+", op.text)
        if op.name == "cf.br":
            yield labels[0], ()
        else:
            for label, holds in zip(labels, (True, False), strict=True):
                yield label, tuple(self._values.given(op.operands[0], (), holds))

    def _visit(self, op: TtirOp, facts: tuple[Form, ...]) -> None:
        self._values.define(op, facts)
        if op.name in ("tt.load", "tt.store") or op.name.startswith("tt.atomic"):
            self._access(op, facts)
        elif op.name == "scf.for":
            self._for(op, facts)
        elif op.name == "scf.while":
            self._while(op, facts)
        elif op.name == "scf.if":
            self._if(op, facts)

    # -- regions -------------------------------------------------------------------------------------------------------

    def _for(self, op: TtirOp, facts: tuple[Form, ...]) -> None:
        known = self._values
        begin, end, step = (known.form(name, ()) for name in op.bounds)
        known.types[op.counter] = known.types[op.bounds[0]]
        by = step.constant if step.known and isinstance(step.constant, int) and step.constant > 0 else 1
        known.counters[op.counter] = begin, end, by
        self._carry(op, facts)
        inside = (*facts, known.form(op.counter, ()).plus(end, -1).plus(Form(1)))

        def once() -> list[str]:
            last = self.blocks(op.regions[0], inside)
            return list(last.operands) if last is not None and last.name == "scf.yield" else []

        self._until_stable(op, once, inside)
        for (name, _), result in zip(op.carried, op.results, strict=True):
            known.types.setdefault(result, known.types[name])
            if name in known.ranges:
                known.ranges[result] = known.ranges[name]

    def _while(self, op: TtirOp, facts: tuple[Form, ...]) -> None:
        known = self._values
        self._carry(op, facts)
        after = [name for name, _ in op.regions[1][0].arguments]
        known.types |= dict(op.regions[1][0].arguments)

        def once() -> list[str]:
            last = self.blocks(op.regions[0], facts)
            assert last is not None and last.name == "scf.condition"
            condition, *passed = last.operands
            going, ended = ((*facts, *known.given(condition, (), holds)) for holds in (True, False))
            for name, result, value in zip(after, op.results, passed, strict=True):
                self._set_range(name, value, going)
                self._set_range(result, value, ended)
            # the carried value is the same value: facts about one hold for the other
            same = [fact for pair in zip(after, passed, strict=True) for fact in self._equal(*pair)]
            end = self.blocks(op.regions[1], (*going, *same))
            return list(end.operands) if end is not None else []

        self._until_stable(op, once, facts)

    def _if(self, op: TtirOp, facts: tuple[Form, ...]) -> None:
        for holds, region in zip((True, False), op.regions, strict=False):
            here = (*facts, *self._values.given(op.operands[0], (), holds))
            last = self.blocks(region, here)
            if last is not None and last.name == "scf.yield":
                for name, value in zip(op.results, last.operands, strict=True):
                    self._values.types.setdefault(name, self._values.types[value])
                    self._values.choices.setdefault(name, {})[value] = here

    def _carry(self, op: TtirOp, facts: tuple[Form, ...]) -> None:
        """Give a loop's carried values the ranges of their initial values."""
        self._values.forget()  # found when the loop was walked before
        for name, value in op.carried:
            self._values.types[name] = self._values.types[value]
            self._set_range(name, value, facts)

    def _until_stable(self, op: TtirOp, once: Callable[[], list[str]], facts: tuple[Form, ...]) -> None:
        """Walk a loop's body until its carried values stay in the ranges assumed for them. Only the last walk reports
        faults."""
        ranges, types = self._values.ranges, self._values.types
        first = {name: ranges[name] for name, _ in op.carried if name in ranges}
        self._quiet += 1
        for attempt in range(_PASSES + 1):
            changed = False
            for (name, _), value in zip(op.carried, once(), strict=False):
                if name not in first:
                    continue
                old, new = ranges[name], joined(self._values.range_of(value, facts), ranges[name])
                grown = bool(np.any(new[0] < old[0])), bool(np.any(new[1] > old[1])), new[2] != old[2]
                low, high = whole_range(types[name])
                if any(grown) and attempt == _PASSES - 1:  # anything
                    new = low if grown[0] else new[0], high if grown[1] else new[1], 1
                ranges[name], changed = new, changed or any(grown)
            if not changed:
                break
            self._values.forget()
        if attempt:  # conclusions from this are as true, and may be tighter
            yielded = [(n, v) for (n, _), v in zip(op.carried, once(), strict=False) if n in first]
            ranges |= {name: joined(self._values.range_of(value, facts), first[name]) for name, value in yielded}
            self._values.forget()
        self._quiet -= 1
        once()

    def _equal(self, one: str, other: str) -> tuple[Form, ...]:
        """The two facts that two integers are equal."""
        if self._values.types[one].shape or not self._values.integer(one):
            return ()
        apart = self._values.form(one, ()).plus(self._values.form(other, ()), -1)
        return apart, apart.times(-1)

    def _set_range(self, name: str, value: str, facts: tuple[Form, ...]) -> None:
        """Widen the range of `name` by that of `value` where `facts` hold."""
        self._values.types.setdefault(name, self._values.types[value])
        if self._values.integer(name):
            self._values.ranges[name] = self._values.range_of(value, facts)

    # -- accesses ------------------------------------------------------------------------------------------------------

    def _access(self, op: TtirOp, facts: tuple[Form, ...]) -> None:
        if self._quiet:
            return
        known, pointer = self._values, op.operands[0]
        view: View = tuple(range(len(known.types[pointer].shape)))
        mask = self._mask_of(op)
        masked = (*facts, *(known.given(mask, view, True) if mask else ()))
        what = {"tt.load": "reads", "tt.store": "writes"}.get(op.name, "counts in")
        try:
            root, before, behind = self._outside(pointer, view, masked)
            if before or behind:  # once more, now that divisions know their operand is not negative
                known.forget()
                known.there = masked
                root, before, behind = self._outside(pointer, view, masked)
                known.forget()
                known.there = ()
        except UnclearError as unclear:
            self.faults[f"{what} where {unclear}"] = None
            return
        for nbytes, where in ((before, "before the beginning"), (behind, "behind the end")):
            if nbytes:
                self.faults[f"{what} {nbytes} bytes {where} of argument {root}"] = None
        self._narrow(pointer, view, masked, set())
        if mask:
            self._narrow(mask, view, facts, set())

    def _outside(self, pointer: str, view: View, facts: tuple[Form, ...]) -> tuple[int, int, int]:
        """The number of the argument that a pointer is derived from, and how many bytes before and behind the
        argument's memory an access may touch."""
        root, offset = self._values.pointer(pointer, view)
        end = offset.plus(Form(self._values.types[pointer].bits // 8)).plus(Form(self._memory[root].nbytes), -1)
        low, high = lower(offset, facts, 0), upper(end, facts, 0)
        return root, max(-int(np.min(low)), 0), max(int(np.max(high)), 0)

    def _mask_of(self, op: TtirOp) -> str:
        """The name of the mask of a load or store; "" if it has none."""
        operands = op.operands[1 if op.name == "tt.load" else 2 :]
        kinds = ((name, self._values.types[name]) for name in operands)
        return next((name for name, kind in kinds if kind.element == "i1" and not kind.pointer), "")

    def _narrow(self, name: str, view: View, facts: tuple[Form, ...], seen: set[tuple[str, View]]) -> None:
        """A fault for each integer that `name` is computed from and that may not fit its type where `facts` hold."""
        op = self._values.ops.get(name)
        if (name, view) in seen or op is None or op.name in _ENDS:
            return
        seen.add((name, view))
        kind = self._values.types[name]
        if op.name in _GROWING and kind.bits > 1:
            low, high = whole_range(kind)
            form = self._values.form(name, view)
            where = f"{op.name}{op.text[:60]}"
            if (name, view) in self._values.wrapped:
                self.faults[IndexFault(f"an index of {kind.bits} bits may be anything: {where}")] = None
            elif np.any(form.low < low) or np.any(form.high > high):
                top, bottom = upper(form, facts, high), lower(form, facts, low)
                if np.any(top > high) or np.any(bottom < low):
                    size = int(max(np.max(top), -np.min(bottom)))
                    self.faults[IndexFault(f"an index of {kind.bits} bits is up to {size}: {where}")] = None
        for operand, inner in self._values.operand_views(op, view):
            self._narrow(operand, inner, facts, seen)
