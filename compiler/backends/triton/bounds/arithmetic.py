"""The results of integer operations on linear forms: a form if the result is linear, else an unknown with bounds and
facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import numpy as np

from .forms import Form, Number, least, most, upper


@dataclass(frozen=True)
class Operation:
    """One operation on two integers of `bits` bits.

    unknown: makes an unknown that stands for its result, given bounds, a divisor and facts. facts: facts that hold
    where the result is computed. positive: whether a division's left operand is known not to be negative there.
    """

    bits: int
    unknown: Callable[..., Form]
    facts: tuple[Form, ...]
    positive: bool


def add(op: Operation, a: Form, b: Form) -> Form:
    """a + b."""
    return a.plus(b)


def subtract(op: Operation, a: Form, b: Form) -> Form:
    """a - b."""
    return a.plus(b, -1)


def multiply(op: Operation, a: Form, b: Form) -> Form:
    """a * b. Linear if one of them is known; else its bounds are the extremes of the products of bounds."""
    if a.known or b.known:
        return b.times(a.constant) if a.known else a.times(b.constant)
    corners = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    low, high = corners[0], corners[0]
    for corner in corners[1:]:
        low, high = least(low, corner), most(high, corner)
    return op.unknown(low, high, a.divisor * b.divisor)


def shift_left(op: Operation, a: Form, b: Form) -> Form | None:
    """a << b; None if b is not one known number."""
    return a.times(1 << b.constant) if b.known and isinstance(b.constant, int) else None


def shift_right(op: Operation, a: Form, b: Form) -> Form | None:
    """a >> b, rounded down; None if b is not one known number."""
    if not b.known or not isinstance(b.constant, int):
        return None
    return op.unknown(a.low >> b.constant, a.high >> b.constant)


def shift_right_unsigned(op: Operation, a: Form, b: Form) -> Form | None:
    """a >> b of a's bits as an unsigned number; None if b is not one known number."""
    if not b.known or not isinstance(b.constant, int):
        return None
    return shift_right(op, a, b) if np.all(a.low >= 0) else op.unknown(0, (2**op.bits - 1) >> b.constant)


def minimum(op: Operation, a: Form, b: Form) -> Form:
    """The smaller of a and b."""
    return _extreme(op, a, b, 1)


def maximum(op: Operation, a: Form, b: Form) -> Form:
    """The larger of a and b."""
    return _extreme(op, a, b, -1)


def _extreme(op: Operation, a: Form, b: Form, sign: int) -> Form:
    """The smaller of a and b with sign 1, the larger with sign -1."""
    pick = least if sign > 0 else most
    if a.known and b.known:
        return Form(pick(a.constant, b.constant))
    apart = a.plus(b, -1).times(sign)
    if np.all(upper(apart, (), 0) <= 0):
        return a
    if np.all(upper(apart.times(-1), (), 0) <= 0):
        return b
    found = op.unknown(pick(a.low, b.low), pick(a.high, b.high), gcd(a.divisor, b.divisor))
    [unknown] = found.terms
    unknown.facts = [found.plus(a, -1).times(sign), found.plus(b, -1).times(sign)]
    return found


def divide(op: Operation, a: Form, b: Form) -> Form:
    """a / b, rounded towards zero. If a is not negative and b is known and positive, with the facts that b * result <=
    a and a - b < b * result."""
    if not (b.known and np.all(b.constant > 0) and op.positive):
        size = _size(a)
        return op.unknown(0 if op.positive else -size, size)
    by = b.constant
    if a.known:
        return Form(a.constant // by)
    found = op.unknown(most(a.low, 0) // by, most(a.high, 0) // by)
    if isinstance(by, int):
        [unknown] = found.terms
        unknown.divisor = max(a.divisor // by, 1) if a.divisor % by == 0 else 1
        unknown.facts = [found.times(by).plus(a, -1), a.plus(found, -by).plus(Form(1 - by))]
    return found


def remainder(op: Operation, a: Form, b: Form) -> Form:
    """The remainder of `divide`, with a's sign: `a` itself if facts say that it is below b, else a multiple of the
    common divisor of both."""
    if not (b.known and np.all(b.constant > 0) and op.positive):
        size = least(_size(a), most(abs(b.constant) - 1, 0)) if b.known else _size(a)
        return op.unknown(0 if op.positive else -size, size)
    by = b.constant
    if a.known:
        return Form(a.constant % by)
    if np.all(upper(a, op.facts, by - 1) < by):
        return a
    step = gcd(a.divisor, by) if isinstance(by, int) else 1
    found = op.unknown(0, least(by - step, most(a.high, 0)), step)
    [unknown] = found.terms
    unknown.facts = [found.plus(a, -1)]
    return found


def both_bits(op: Operation, a: Form, b: Form) -> Form | None:
    """a & b, from 0 to the smaller of the two; None if either may be negative and neither is a known mask."""
    for one in (a, b):
        if one.known and np.all(one.constant >= 0):
            return op.unknown(0, one.constant)
    if np.all(a.low >= 0) and np.all(b.low >= 0):
        return op.unknown(0, least(a.high, b.high))
    return None


def either_bits(op: Operation, a: Form, b: Form) -> Form | None:
    """a | b, below the next power of two above both; None if either may be negative."""
    if np.any(a.low < 0) or np.any(b.low < 0):
        return None
    top = max(int(np.max(a.high)), int(np.max(b.high)))
    return op.unknown(0, (1 << top.bit_length()) - 1)


def _size(a: Form) -> Number:
    return most(most(a.high, -a.low), 0)


OPERATIONS: dict[str, Callable[[Operation, Form, Form], Form | None]] = {
    "arith.addi": add, "arith.subi": subtract, "arith.muli": multiply, "arith.shli": shift_left,
    "arith.shrsi": shift_right, "arith.shrui": shift_right_unsigned, "arith.minsi": minimum, "arith.maxsi": maximum,
    "arith.divsi": divide, "arith.divui": divide, "arith.remsi": remainder, "arith.remui": remainder,
    "arith.andi": both_bits, "arith.ori": either_bits, "arith.xori": either_bits,
}  # fmt: skip
DIVISIONS = ("arith.divsi", "arith.divui", "arith.remsi", "arith.remui")
