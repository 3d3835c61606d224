"""Grammar rules for the numbers of a schema, and for multiples."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .numbers import integers, numbers
from .rules import Alternative, Verbatim, literal

if TYPE_CHECKING:
    from jsonschema_rs.canonical import IntegerView, NumberView

    from .values import ValueRules

_MOST_LISTED = 512  # up to so many multiples are listed one by one
_EXACT = 2**53  # integers up to here are exact in every reader
_MOST_REMAINDERS = 10_000  # remainders of a division; each is a state


def integer_rules(values: ValueRules, view: IntegerView) -> list[Alternative]:
    """The alternatives for the integers of a schema."""
    values.wider = values.wider or bool(view.not_multiple_of)
    if not view.multiple_of:
        return [(values.rules.terminal(integers(view.minimum, view.maximum)),)]
    step = _common([*view.multiple_of, 1])
    least, most = view.minimum, view.maximum
    if least is not None and most is not None and (most - least) / step <= _MOST_LISTED:
        first = math.ceil(least / step)
        found = [step * number for number in range(first, math.floor(most / step) + 1)]
        return [(literal(str(int(value))),) for value in found if value.denominator == 1]
    return [_multiples("integer", step, least, most, {})]


def number_rules(values: ValueRules, view: NumberView) -> list[Alternative]:
    """The alternatives for the numbers of a schema."""
    least, most = view.minimum, view.maximum
    fractional = view.excludes_integers or 1 in view.not_multiple_of
    if any(step != 1 for step in view.not_multiple_of) or (view.multiple_of and fractional):
        values.wider = True
    above, below = view.exclusive_minimum, view.exclusive_maximum
    if view.multiple_of:
        edges = {"exclusiveMinimum": above, "exclusiveMaximum": below}
        return [_multiples("number", _common(view.multiple_of), least, most, edges)]
    return [(values.rules.terminal(numbers(least, most, above, below, not fractional)),)]


def _multiples(kind: str, step: Fraction, least: Any, most: Any, edges: dict[str, bool]) -> Alternative:
    """A rule of llguidance that tracks the remainder. RequestError if the numbers are not exact in a double."""
    bounds = [bound for bound in (least, most) if bound is not None]
    states = step.numerator
    while states % 10 == 0:  # zeros at the end are cheap
        states //= 10
    if any(abs(bound) > _EXACT for bound in bounds) or step > _EXACT or states > _MOST_REMAINDERS:
        raise RequestError("the schema is not supported: multiples of a number so large", field="response_format")
    schema: dict[str, Any] = {"type": kind, "x-guidance": {"whitespace_flexible": False}}
    schema["multipleOf"] = int(step) if step.denominator == 1 else float(step)
    for name, bound in (("inimum", least), ("aximum", most)):
        if bound is not None:
            exclusive = edges.get(f"exclusiveM{name}", False)
            schema[f"exclusiveM{name}" if exclusive else f"m{name}"] = _plain(bound)
    return (Verbatim(f"%json {json.dumps(schema)}"),)


def _plain(bound: int | float | Decimal) -> int | float:
    return float(bound) if isinstance(bound, Decimal) else bound


def _common(steps: list[Any]) -> Fraction:
    """The least common multiple."""
    exact = [Fraction(Decimal(str(step))) for step in steps]
    return Fraction(math.lcm(*(f.numerator for f in exact)), math.gcd(*(f.denominator for f in exact)))
