"""Facts about the integers in a Triton kernel's IR: each value as a linear form, each condition as facts.

A value of the IR is a block with axes. The form of a value is computed along a view, which gives every axis a name. The
position along an axis is an unknown of that name, so that positions along two axes are two unknowns, and a mask bounds
an address only if both are seen with the same names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd

import numpy as np

from .arithmetic import DIVISIONS, OPERATIONS, Operation
from .forms import Form, Number, UnknownInteger, least, lower, most, upper
from .ttir import TtirFunction, TtirOp, TtirType

Range = tuple[Number, Number, int]  # an integer's least and largest value, and a number that divides it
View = tuple[object, ...]  # a name for each axis of a value; None for an axis of size 1
# operations that keep the elements of their one operand in place along each axis, and operations that move them
PASSING = ("tt.splat", "tt.expand_dims", "tt.broadcast", "tt.trans", "arith.extsi", "arith.index_cast")
MOVING = ("tt.join", "tt.cat", "tt.split", "tt.gather", "tt.reshape")
_FAR = 2**50  # no memory has so many bytes; a larger integer is treated as any integer of its type
_UNEQUAL = ("ogt", "olt", "one")  # comparisons of floats that are false for a number and itself
_OPPOSITE = {"slt": "sge", "sle": "sgt", "sgt": "sle", "sge": "slt", "ult": "uge", "eq": "ne", "ne": "eq"}


@dataclass(frozen=True)
class Memory:
    """The memory of a pointer argument: `nbytes` bytes, holding integers from `low` to `high` (None: any)."""

    nbytes: Number
    low: Number | None = None
    high: Number | None = None


@dataclass(frozen=True)
class Samples:
    """The samples that are examined: programs of a launch, at some sizes of the batch.

    place: the programs' numbers along the three axes of the grid, an array [samples] each. grid: how many programs
    there are along each axis. integers: the values of the kernel's integer arguments, by the argument's number.
    """

    place: tuple[np.ndarray, np.ndarray, np.ndarray]
    grid: tuple[Number, Number, Number]
    integers: Mapping[int, Number]


Reader = Callable[["KernelValues", TtirOp, str, View], Form | None]
"""Gives the form of an operation's result from the values, the operation, the result's name and a view; None where
nothing is known of it."""


class UnclearError(Exception):
    """A pointer is computed in a way that this analysis does not know; the message says how."""


class KernelValues:
    """The facts about the values of a kernel; `_Walk` in addresses.py fills them in while it walks the kernel.

    Values are named as in the IR. A fact is a form that is at most 0.

    types, ops: the type of each value, and the operation that computes it.
    facts: the facts that hold where each value is computed.
    ranges: the bounds of values that a loop carries from one iteration to the next.
    choices: for the result of an `scf.if`, the values it may be, each with the facts that hold in its branch.
    counters: first value, end and step of each loop's counter.
    there: the facts given by the mask of the access under examination.
    wrapped: values, by name and view, that may be too large for the analysis.
    sums: the results of the reductions of each value.
    memory: the memory of pointer arguments, by the argument's number.
    samples: the programs that are examined.
    readers: by the names of operations, the functions that give the forms of their results (readers.py). Integer
    operations with two operands need none (arithmetic.py).
    """

    def __init__(
        self,
        function: TtirFunction,
        memory: Mapping[int, Memory],
        samples: Samples,
        readers: Mapping[str, Reader],
    ) -> None:
        self.types: dict[str, TtirType] = dict(function.arguments)
        self.ops: dict[str, TtirOp] = {}
        self.facts: dict[str, tuple[Form, ...]] = {}
        self.ranges: dict[str, Range] = {}
        self.choices: dict[str, dict[str, tuple[Form, ...]]] = {}
        self.counters: dict[str, tuple[Form, Form, int]] = {}
        self.there: tuple[Form, ...] = ()
        self.wrapped: set[tuple[str, View]] = set()
        self.sums: dict[str, dict[str, None]] = {}
        self._arguments = {name: number for number, (name, _) in enumerate(function.arguments)}
        self.memory, self.samples, self._readers = memory, samples, readers
        self._forms: dict[tuple[str, View], Form] = {}
        self._unknowns: dict[object, UnknownInteger] = {}
        self._widened: dict[str, dict[str, None]] = {}  # a boolean value: the integers 0 and 1 made of it

    def define(self, op: TtirOp, facts: tuple[Form, ...]) -> None:
        """Record an operation, its results and their types; `facts` hold at the operation."""
        for name, kind in zip(op.results, op.result_types, strict=False):
            self.types[name], self.ops[name] = kind, op
        self.facts |= dict.fromkeys(op.results, facts)
        if op.name == "tt.reduce":
            self.sums.setdefault(op.operands[0], {})[op.results[0]] = None
        elif op.name == "arith.extui":
            self._widened.setdefault(op.operands[0], {})[op.results[0]] = None

    def forget(self) -> None:
        """Drop all forms found up to now: call it when `ranges` have changed."""
        self._forms = {}

    def integer(self, name: str) -> bool:
        """Whether the elements of a value are integers, and not floats or pointers."""
        kind = self.types[name]
        return not kind.pointer and kind.element.startswith("i")

    def range_of(self, value: str, facts: tuple[Form, ...]) -> Range:
        """The bounds of an integer where `facts` hold, over all elements of its block, and a number that divides it."""
        form = self.form(value, own_view(self.types[value], value))
        return lower(form, facts), upper(form, facts), form.divisor

    def operand_views(self, op: TtirOp, view: View) -> list[tuple[str, View]]:
        """The operands of an operation whose result is seen along `view`, each with the view along which it is seen.

        If an operation moves elements, the axes of its operands get new names.
        """
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
        apart = op.name in (*MOVING, "tt.elementwise_inline_asm")
        return [
            (o, self._only_wide(o, view) if not apart and len(kind.shape) == len(view) else own_view(kind, o))
            for o in op.operands
            if (kind := self.types.get(o))
        ]

    def _only_wide(self, name: str, view: View) -> View:
        return tuple(at if size > 1 else None for at, size in zip(view, self.types[name].shape, strict=True))

    def pointer(self, name: str, view: View) -> tuple[int, Form]:
        """The number of the argument that a pointer is derived from, and the pointer's offset from it in bytes.

        Raises UnclearError if an operation is not known, a loop carries the pointer, or the pointer may come from
        either of two arguments.
        """
        if name in self._arguments:
            return self._arguments[name], Form(0)
        op = self.ops.get(name)
        if op is None:
            raise UnclearError("a pointer is carried by a loop")
        if op.name == "tt.addptr":
            (base, at), (offset, inside) = self.operand_views(op, view)
            root, form = self.pointer(base, at)
            return root, form.plus(self.form(offset, inside), self.types[name].bits // 8)
        if op.name in (*PASSING, "tt.bitcast"):
            [(base, at)] = self.operand_views(op, view)
            return self.pointer(base, at)
        if op.name == "arith.select":
            (condition, place), *choices = self.operand_views(op, view)
            (one, first), (other, second) = (self.pointer(*choice) for choice in choices)
            if one == other:
                return one, self.either(("pointer", name, view), condition, place, first, second)
        raise UnclearError(f"{op.name} makes a pointer")

    def form(self, name: str, view: View) -> Form:
        """The form of an integer along a view."""
        view = self._only_wide(name, view) if self.types[name].shape else ()
        key = name, view
        if key not in self._forms:
            found = self._evaluate(name, view)
            if np.any(most(found.high, -found.low) > _FAR):  # a hash or a packed key, which may wrap around
                self.wrapped.add(key)
                found = self.unknown((key, "wrapped"), *whole_range(self.types[name]))
            self._forms[key] = found
        return self._forms[key]

    def unknown(self, key: object, low: Number, high: Number, divisor: int = 1) -> Form:
        """A form of one unknown, the one that `key` identifies, with these bounds and no facts."""
        found = self._unknowns.setdefault(key, UnknownInteger(low, high))
        found.low, found.high, found.divisor, found.facts = low, high, divisor, []
        return Form.of(found)

    def _evaluate(self, name: str, view: View) -> Form:
        if name in self._arguments:
            return Form(self.samples.integers[self._arguments[name]])
        if name in self.counters:
            return self._counter(name, view)
        if name in self.choices and self.integer(name):
            first, *others = (self.range_of(value, facts) for value, facts in self.choices[name].items())
            for other in others:
                first = joined(first, other)
            return self.unknown((name, view), *first)
        if name in self.ranges:
            return self.unknown((name, view), *self.ranges[name])
        op = self.ops.get(name)
        found = None
        if op is not None and op.name in OPERATIONS:
            found = self._binary(op, name, view)
        elif op is not None and op.name in self._readers:
            found = self._readers[op.name](self, op, name, view)
        return self.unknown((name, view), *whole_range(self.types[name])) if found is None else found

    def _counter(self, name: str, view: View) -> Form:
        begin, end, step = self.counters[name]
        if begin.known and end.known and np.all(end.constant - begin.constant <= step):
            return begin  # there is one iteration at most
        high = most(end.high - 1, begin.low)
        if begin.known and step > 1:
            high = begin.constant + (high - begin.constant) // step * step
        found = self.unknown((name, view), begin.low, high, gcd(begin.divisor, step))
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
            return self.unknown(key, *bounds)

        return OPERATIONS[op.name](Operation(self.types[name].bits, unknown, here, positive), a, b)

    def either(self, key: object, condition: str, place: View, one: Form, other: Form) -> Form:
        """The form of a choice: `one` if a condition holds, else `other`.

        key: identifies the form's unknown. place: the view along which the condition is seen.
        """
        yes, no = (tuple(self.given(condition, place, holds)) for holds in (True, False))
        if one.known and other.known and np.array_equal(one.constant, other.constant):
            return one
        low = least(lower(one, yes), lower(other, no))
        found = self.unknown(key, low, most(upper(one, yes), upper(other, no)), gcd(one.divisor, other.divisor))
        apart, [unknown] = one.plus(other, -1), found.terms
        if np.all(apart.high <= 0):
            one, other, apart = other, one, apart.times(-1)
        if np.all(apart.low >= 0):  # other <= one: the result lies between them
            unknown.facts = [found.plus(one, -1), other.plus(found, -1)]
        return found

    def given(self, name: str, view: View, holds: bool) -> Iterator[Form]:
        """The facts that follow if the condition `name`, seen along `view`, is true (or false, if not `holds`)."""
        op = self.ops.get(name)
        if op is None:
            return
        for wide in self._widened.get(name, ()):
            yield Form(1).plus(self.form(wide, view), -1) if holds else self.form(wide, view)
        operands = self.operand_views(op, view)
        if op.name in PASSING:
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
            forms = (self.form(*operand) for operand in operands)
            yield from (fact.tight for fact in _compared(kind if holds else _OPPOSITE.get(kind, ""), *forms))
        elif op.name == "arith.cmpf" and holds and op.text.strip()[:3] in _UNEQUAL:
            (one, place), (other, _) = operands
            loaded = self.ops.get(one)
            if loaded is not None and loaded.name == "tt.load" and loaded.operands[2:] == (other,):
                yield from self.given(loaded.operands[1], place, True)  # the two are equal in masked elements


def _compared(kind: str, a: Form, b: Form) -> Iterator[Form]:
    """The facts that `a kind b` gives, by MLIR's names of comparisons; no facts for "ne" and unlisted names."""
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
    """The range that holds both."""
    return least(one[0], other[0]), most(one[1], other[1]), gcd(one[2], other[2])


def whole_range(kind: TtirType) -> tuple[int, int]:
    """The least and the largest integer of a type, neither beyond the analysis's limit (2**50)."""
    return max(-(2 ** (kind.bits - 1)), -_FAR), min(2 ** (kind.bits - 1) - 1, _FAR)


def own_view(kind: TtirType, name: str) -> View:
    """A view with names that no other value has: for bounds over a whole block, independent of other blocks."""
    return tuple((name, axis) if size > 1 else None for axis, size in enumerate(kind.shape))
