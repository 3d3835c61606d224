"""The integers of a kernel's IR as linear forms, and its conditions as facts about them.

A value is looked at along a view: the axes of a block by the names that who asks has for them. So a lane of one axis is
not taken for the same lane of another, and a mask says something of an address only where their axes are the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd

import numpy as np

from .arithmetic import DIVISIONS, OPERATIONS, Operation
from .forms import Form, Number, Unknown, least, lower, most, upper
from .ttir import TtirFunction, TtirOp, TtirType

Range = tuple[Number, Number, int]  # least, most, and what it is a multiple of
View = tuple[object, ...]  # for each axis of a value, what its place along it is called; None where it has one place
_FAR = 2**50  # no memory is so large; beyond, numbers of 64 bits are not followed
_SAME = ("tt.splat", "tt.expand_dims", "tt.broadcast", "tt.trans", "arith.extsi", "arith.index_cast")
_ANYWHERE = ("tt.join", "tt.cat", "tt.split", "tt.gather", "tt.reshape")
_OPPOSITE = {"slt": "sge", "sle": "sgt", "sgt": "sle", "sge": "slt", "ult": "uge", "eq": "ne", "ne": "eq"}


@dataclass(frozen=True)
class Memory:
    """What a pointer argument points to: its size in bytes, and between which numbers the integers there lie."""

    nbytes: Number
    low: Number | None = None
    high: Number | None = None


@dataclass(frozen=True)
class Samples:
    """The programs that are looked at: their place in the grid, the grid, and what the integer arguments are."""

    place: tuple[np.ndarray, np.ndarray, np.ndarray]
    grid: tuple[Number, Number, Number]
    integers: Mapping[int, Number]


class UnclearError(Exception):
    """A pointer that is not followed."""


class Values:
    """What is known of the values of a kernel; `_Walk` in addresses.py fills it while it goes through the kernel.

    types, ops: the type of each value, and the operation that gives it.
    facts: what holds where each value is computed.
    ranges: the bounds of values that loops carry from one turn to the next.
    choices: the values that a condition chooses from, each with what holds where it is chosen.
    counters: begin, end and step of each loop's counter.
    there: what holds where the access under examination is made, by its mask.
    wrapped: values that may leave 64 bits.
    """

    def __init__(self, function: TtirFunction, memory: Mapping[int, Memory], samples: Samples) -> None:
        self.types: dict[str, TtirType] = dict(function.arguments)
        self.ops: dict[str, TtirOp] = {}
        self.facts: dict[str, tuple[Form, ...]] = {}
        self.ranges: dict[str, Range] = {}
        self.choices: dict[str, dict[str, tuple[Form, ...]]] = {}
        self.counters: dict[str, tuple[Form, Form, int]] = {}
        self.there: tuple[Form, ...] = ()
        self.wrapped: set[tuple[str, View]] = set()
        self._arguments = {name: number for number, (name, _) in enumerate(function.arguments)}
        self._memory, self._samples = memory, samples
        self._forms: dict[tuple[str, View], Form] = {}
        self._unknowns: dict[object, Unknown] = {}
        self._sums: dict[str, dict[str, None]] = {}  # what is reduced: the results
        self._widened: dict[str, dict[str, None]] = {}  # bits: the same as integers

    def define(self, op: TtirOp, facts: tuple[Form, ...]) -> None:
        """An operation that is met where facts hold."""
        for name, kind in zip(op.results, _result_types(op), strict=False):
            self.types[name], self.ops[name] = kind, op
        self.facts |= dict.fromkeys(op.results, facts)
        if op.name == "tt.reduce":
            self._sums.setdefault(op.operands[0], {})[op.results[0]] = None
        elif op.name == "arith.extui":
            self._widened.setdefault(op.operands[0], {})[op.results[0]] = None

    def forget(self) -> None:
        """All that was found, as ranges have changed."""
        self._forms = {}

    def integer(self, name: str) -> bool:
        """Whether a value is of integers."""
        kind = self.types[name]
        return not kind.pointer and kind.element.startswith("i")

    def range_of(self, value: str, facts: tuple[Form, ...]) -> Range:
        """The bounds and divisor of an integer where facts hold, wherever it is in a block."""
        form = self.form(value, _own_view(self.types[value], value))
        return lower(form, facts), upper(form, facts), form.divisor

    def operand_views(self, op: TtirOp, view: View) -> list[tuple[str, View]]:
        """The operands of an operation, each with its view."""
        match op.name:
            case "tt.splat":
                return [(op.operands[0], ())]
            case "tt.expand_dims":
                axis = op.attribute("axis")
                return [(op.operands[0], view[:axis] + view[axis + 1 :])]
            case "tt.trans":
                order = [int(n) for n in re.findall(r"\d+", op.text.partition("array<i32:")[2].partition(">")[0])]
                inner: list[object] = [None] * len(order)
                for at, axis in enumerate(order):
                    inner[axis] = view[at]
                return [(op.operands[0], self._only_wide(op.operands[0], tuple(inner)))]
        apart = op.name in (*_ANYWHERE, "tt.elementwise_inline_asm")
        return [
            (o, self._only_wide(o, view) if not apart and len(kind.shape) == len(view) else _own_view(kind, o))
            for o in op.operands
            if (kind := self.types.get(o))
        ]

    def _only_wide(self, name: str, view: View) -> View:
        return tuple(at if size > 1 else None for at, size in zip(view, self.types[name].shape, strict=True))

    def pointer(self, name: str, view: View) -> tuple[int, Form]:
        """The argument that a pointer is derived from, and how many bytes behind its beginning it points."""
        if name in self._arguments:
            return self._arguments[name], Form(0)
        op = self.ops.get(name)
        if op is None:
            raise UnclearError("a pointer is carried by a loop")
        if op.name == "tt.addptr":
            (base, at), (offset, inside) = self.operand_views(op, view)
            root, form = self.pointer(base, at)
            return root, form.plus(self.form(offset, inside), self.types[name].bits // 8)
        if op.name in (*_SAME, "tt.bitcast"):
            [(base, at)] = self.operand_views(op, view)
            return self.pointer(base, at)
        if op.name == "arith.select":
            (condition, place), *choices = self.operand_views(op, view)
            (one, first), (other, second) = (self.pointer(*choice) for choice in choices)
            if one == other:
                return one, self._either(("pointer", name, view), condition, place, first, second)
        raise UnclearError(f"{op.name} makes a pointer")

    def form(self, name: str, view: View) -> Form:
        """An integer where the axes are called so."""
        view = self._only_wide(name, view) if self.types[name].shape else ()
        key = name, view
        if key not in self._forms:
            found = self._evaluate(name, view)
            if np.any(most(found.high, -found.low) > _FAR):  # a hash, or a packed key: it may wrap
                self.wrapped.add(key)
                found = self._unknown((key, "wrapped"), *whole_range(self.types[name]))
            self._forms[key] = found
        return self._forms[key]

    def _unknown(self, key: object, low: Number, high: Number, divisor: int = 1) -> Form:
        """The unknown of that name, with bounds that may have moved."""
        found = self._unknowns.setdefault(key, Unknown(low, high))
        found.low, found.high, found.divisor, found.facts = low, high, divisor, []
        return Form.of(found)

    def _evaluate(self, name: str, view: View) -> Form:
        if name in self._arguments:
            return Form(self._samples.integers[self._arguments[name]])
        if name in self.counters:
            return self._counter(name, view)
        if name in self.choices and self.integer(name):
            first, *others = (self.range_of(value, facts) for value, facts in self.choices[name].items())
            for other in others:
                first = joined(first, other)
            return self._unknown((name, view), *first)
        if name in self.ranges:
            return self._unknown((name, view), *self.ranges[name])
        op = self.ops.get(name)
        found = None
        if op is not None and op.name in OPERATIONS:
            found = self._binary(op, name, view)
        elif op is not None and op.name in _READERS:
            found = _READERS[op.name](self, op, name, view)
        return self._unknown((name, view), *whole_range(self.types[name])) if found is None else found

    def _counter(self, name: str, view: View) -> Form:
        begin, end, step = self.counters[name]
        if begin.known and end.known and np.all(end.constant - begin.constant <= step):
            return begin  # at most once
        high = most(end.high - 1, begin.low)
        if begin.known and step > 1:
            high = begin.constant + (high - begin.constant) // step * step
        found = self._unknown((name, view), begin.low, high, gcd(begin.divisor, step))
        [unknown] = found.terms
        unknown.facts = [begin.plus(found, -1), found.plus(end, -1).plus(Form(1))]
        return found

    def _binary(self, op: TtirOp, name: str, view: View) -> Form | None:
        a, b = (self.form(*operand) for operand in self.operand_views(op, view))
        key: object = (name, view)
        here, positive = self.facts.get(name, ()), True
        if op.name in DIVISIONS and not np.all(lower(a, here, 0) >= 0):
            positive = bool(self.there) and bool(np.all(lower(a, self.there, 0) >= 0))
            key = (key, "there") if positive else key

        def unknown(*bounds: int) -> Form:
            return self._unknown(key, *bounds)

        return OPERATIONS[op.name](Operation(self.types[name].bits, unknown, here, positive), a, b)

    def _constant(self, op: TtirOp, name: str, view: View) -> Form | None:
        found = constant(op)
        return None if found is None else Form(found)

    def _place(self, op: TtirOp, name: str, view: View) -> Form | None:
        axis = "xyz".index(op.text.split()[0])
        return Form((self._samples.place if op.name == "tt.get_program_id" else self._samples.grid)[axis])

    def _lanes(self, op: TtirOp, name: str, view: View) -> Form | None:
        start, end = op.attribute("start"), op.attribute("end")
        return self._unknown((name, view), start, end - 1) if end - start > 1 else Form(start)

    def _alike(self, op: TtirOp, name: str, view: View) -> Form | None:
        if op.name == "arith.extsi" and self.types[op.operands[0]].element == "i1":
            return self._unknown((name, view), -1, 0)
        return self.form(*self.operand_views(op, view)[0])

    def _narrowed(self, op: TtirOp, name: str, view: View) -> Form | None:
        form, (low, high) = self.form(*self.operand_views(op, view)[0]), whole_range(self.types[name])
        return form if np.all(form.low >= low) and np.all(form.high <= high) else None

    def _unsigned(self, op: TtirOp, name: str, view: View) -> Form | None:
        source = self.types[op.operands[0]]
        if source.element == "i1":
            return self._unknown((name, view), 0, 1)
        form = self.form(*self.operand_views(op, view)[0])
        return form if np.all(form.low >= 0) else self._unknown((name, view), 0, 2**source.bits - 1)

    def _loaded(self, op: TtirOp, name: str, view: View) -> Form | None:
        """A number out of memory lies where its argument says."""
        try:
            root, _ = self.pointer(op.operands[0], view)
        except UnclearError:
            return None
        memory = self._memory[root]
        if memory.low is None or memory.high is None or self.types[name].bits < 32:
            return None
        low, high = memory.low, memory.high
        if len(op.operands) == 3:  # mask and what stands for what is masked
            other = self.form(op.operands[2], view)
            low, high = least(low, other.low), most(high, other.high)
        return self._unknown((name, view), low, high)

    def _chosen(self, op: TtirOp, name: str, view: View) -> Form | None:
        (condition, place), one, other = self.operand_views(op, view)
        return self._either((name, view), condition, place, self.form(*one), self.form(*other))

    def _either(self, key: object, condition: str, place: View, one: Form, other: Form) -> Form:
        """One of two, as a condition is."""
        yes, no = (tuple(self.given(condition, place, holds)) for holds in (True, False))
        if one.known and other.known and np.array_equal(one.constant, other.constant):
            return one
        low = least(lower(one, yes), lower(other, no))
        found = self._unknown(key, low, most(upper(one, yes), upper(other, no)), gcd(one.divisor, other.divisor))
        apart, [unknown] = one.plus(other, -1), found.terms
        if np.all(apart.high <= 0):
            one, other, apart = other, one, apart.times(-1)
        if np.all(apart.low >= 0):  # whichever it is, it lies between them
            unknown.facts = [found.plus(one, -1), other.plus(found, -1)]
        return found

    def _anywhere(self, op: TtirOp, name: str, view: View) -> Form | None:
        """Elements in another order: between the least and the most of all."""
        views = self.operand_views(op, view)
        forms = [self.form(*operand) for operand in views[: 1 if op.name == "tt.gather" else None]]
        low, high = forms[0].low, forms[0].high
        for form in forms[1:]:
            low, high = least(low, form.low), most(high, form.high)
        return self._unknown((name, view), low, high)

    def _reduced(self, op: TtirOp, name: str, view: View) -> Form | None:
        """Sums, and the least and most of what there is."""
        source = op.operands[op.results.index(name)] if len(op.results) > 1 else op.operands[0]
        if not self.integer(source):
            return None
        form = self.form(source, _own_view(self.types[source], source))
        inner = {inside.name for block in op.regions[0] for inside in block.ops}
        if "arith.addi" in inner and len(inner) == 2:
            return self._summed(op, name, view, source, form)
        picks = inner & {"arith.minsi", "arith.maxsi", "arith.select", "arith.ori", "arith.andi"}
        return self._unknown((name, view), form.low, form.high) if picks else None

    def _summed(self, op: TtirOp, name: str, view: View, source: str, form: Form) -> Form:
        axis = op.attribute("axis")
        if op.name == "tt.reduce" and self._one_hot(source):
            return self._unknown((name, view), form.low, form.high)
        count = self.types[source].shape[axis]
        low, high = least(count * form.low, form.low), most(count * form.high, form.high)
        if op.name == "tt.reduce" or np.any(form.low < 0):
            return self._unknown((name, view), low, high)
        found, own = self._unknown((name, view), form.low, high), self.form(source, view)
        totals = [total for total in self._sums.get(source, ()) if self.ops[total].attribute("axis") == axis]
        [unknown] = found.terms
        unknown.facts = [own.plus(found, -1)]  # so far is no less than the last, and no more than all
        unknown.facts += [found.plus(self.form(t, view[:axis] + view[axis + 1 :]), -1) for t in totals]
        return found

    def _one_hot(self, name: str) -> bool:
        """Whether of the elements of a value all but one are 0: where(lane == one, .., 0)."""
        choice = self.ops.get(name)
        if choice is None or choice.name != "arith.select" or len(self.types[name].shape) != 1:
            return False
        zero = self.ops.get(choice.operands[2])
        if zero is None or zero.name != "arith.constant" or constant(zero) != 0:
            return False
        waiting = [choice.operands[0]]
        while waiting:
            op = self.ops.get(waiting.pop())
            if op is not None and op.name == "arith.andi":
                waiting += op.operands
            elif op is not None and op.name == "arith.cmpi" and op.text.strip().startswith("eq"):
                sides = {made.name for side in op.operands if (made := self.ops.get(side))}
                if sides >= {"tt.make_range", "tt.splat"}:
                    return True
        return False

    def given(self, name: str, view: View, holds: bool) -> Iterator[Form]:
        """What is at most 0 where a condition holds, or where it does not."""
        op = self.ops.get(name)
        if op is None:
            return
        for wide in self._widened.get(name, ()):
            yield Form(1).plus(self.form(wide, view), -1) if holds else self.form(wide, view)
        operands = self.operand_views(op, view)
        if op.name in _SAME:
            yield from self.given(*operands[0], holds)
        elif op.name == ("arith.andi" if holds else "arith.ori"):
            for operand in operands:
                yield from self.given(*operand, holds)
        elif op.name == "arith.xori":
            for (one, place), (other, _) in (operands, operands[::-1]):
                if (made := self.ops.get(other)) and made.name == "arith.constant" and "true" in made.text:
                    yield from self.given(one, place, not holds)
        elif op.name == "arith.cmpi" and self.types[op.operands[0]].element != "i1":
            kind = op.text.strip().partition(",")[0]
            yield from _compared(kind if holds else _OPPOSITE.get(kind, ""), *(self.form(*o) for o in operands))


_READERS: dict[str, Callable[[Values, TtirOp, str, View], Form | None]] = {
    "arith.constant": Values._constant, "tt.get_program_id": Values._place, "tt.get_num_programs": Values._place,
    "tt.make_range": Values._lanes, "arith.trunci": Values._narrowed, "arith.extui": Values._unsigned,
    "tt.load": Values._loaded, "arith.select": Values._chosen, "tt.reduce": Values._reduced, "tt.scan": Values._reduced,
    **dict.fromkeys(_SAME, Values._alike), **dict.fromkeys(_ANYWHERE, Values._anywhere),
}  # fmt: skip


def _compared(kind: str, a: Form, b: Form) -> Iterator[Form]:
    apart = a.plus(b, -1)
    match kind:
        case "slt":
            yield apart.plus(Form(1))
        case "sle":
            yield apart
        case "sgt":
            yield apart.times(-1).plus(Form(1))
        case "sge":
            yield apart.times(-1)
        case "ult" if np.all(b.low >= 0):
            yield apart.plus(Form(1))
            yield a.times(-1)
        case "eq":
            yield apart
            yield apart.times(-1)


def joined(one: Range, other: Range) -> Range:
    """What holds of either."""
    return least(one[0], other[0]), most(one[1], other[1]), gcd(one[2], other[2])


def whole_range(kind: TtirType) -> tuple[int, int]:
    """All integers of a type, as far as they are followed."""
    return max(-(2 ** (kind.bits - 1)), -_FAR), min(2 ** (kind.bits - 1) - 1, _FAR)


def constant(op: TtirOp) -> int | None:
    """The integer that a constant is everywhere; None if it is no such."""
    found = re.match(r" (?:dense<)?(-?\d+|true|false)>?(?: :|$)", op.text)
    if found is None:
        return None
    return {"true": 1, "false": 0}[found[1]] if found[1] in ("true", "false") else int(found[1])


def _own_view(kind: TtirType, name: str) -> View:
    """A view for who asks only what a value can be anywhere."""
    return tuple((name, axis) if size > 1 else None for axis, size in enumerate(kind.shape))


def _result_types(op: TtirOp) -> list[TtirType]:
    """The types of what an operation gives; none of those of regions, which are what these are given."""
    if op.name == "arith.constant" and not op.types:
        return [TtirType((), "i1")]
    if not op.results or op.name in ("scf.for", "scf.while", "scf.if") or not op.types:
        return []
    match op.name:
        case "arith.cmpi" | "arith.cmpf":
            return [TtirType(op.types[0].shape, "i1")]
        case "tt.load":
            return [TtirType(op.types[0].shape, op.types[0].element)]
        case "tt.addptr":
            return [op.types[0]]
        case "tt.split":
            return [op.types[-1]] * len(op.results)
    return list(op.types[-len(op.results) :])
