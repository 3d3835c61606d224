"""Regular expressions, over decimal digits, for numbers within bounds: terminals of llguidance's Lark.

Bounds may have any number of digits. Numbers have no more digits than a double can distinguish, so that the text is
within a bound exactly if the number that a reader parses from it is.
"""

from __future__ import annotations

from decimal import Decimal

_MOST_DIGITS = 40  # digits of an integer without bounds
_PRECISION = 15  # decimal digits that every double can distinguish
_FREE = r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,14})?(?:[eE][+-]?[0-9]{1,2})?"

_LONGEST = 60  # digits of a bound; a longer bound is replaced by the next power of ten inside it

Bound = int | float | Decimal | None


def integers(least: Bound = None, most: Bound = None) -> str:
    """An expression for the integers from `least` to `most`, both included; None: no bound."""
    low = None if least is None else int(_rounded(least, up=True).to_integral_value("ROUND_CEILING"))
    high = None if most is None else int(_rounded(most, up=False).to_integral_value("ROUND_FLOOR"))
    parts = []
    if low is None or low < 0:
        below = -1 if high is None or high > -1 else high
        parts.append("-" + _naturals(-below, None if low is None else -low))
    if high is None or high >= 0:
        parts.append(_naturals(max(low or 0, 0), high))
    return f"/{_either(parts)}/"


def numbers(least: Bound, most: Bound, above: bool = False, below: bool = False, whole: bool = True) -> str:
    """An expression for the numbers from `least` to `most`; None: no bound. above, below: leave out the bound itself.
    whole False: leave out every integer."""
    if least is None and most is None and whole:
        return f"/{_FREE}/"
    bounds = [_rounded(bound, bound is least) for bound in (least, most) if bound is not None]
    digits = [_split(bound) for bound in bounds]
    longest = max([len(integral) for integral, _ in digits], default=1)
    wanted = max([len(fraction) for _, fraction in digits], default=0) + 1
    fraction = max(_PRECISION - longest, 1) if wanted + longest < _PRECISION else wanted
    integral = max(longest + 1, _PRECISION - 1) if least is None or most is None else longest
    tail = rf"(?:\.[0-9]{{1,{fraction}}})?" if whole else rf"\.[0-9]{{0,{fraction - 1}}}[1-9]"
    parts = [f"/-?(?:0|[1-9][0-9]{{0,{integral - 1}}}){tail}/"]
    if least is not None:
        parts.append(_at_least(bounds[0], above))
    if most is not None:
        parts.append(_at_most(bounds[-1], below))
    return " & ".join(parts)


def _naturals(least: int, most: int | None) -> str:
    """An expression for natural numbers without leading zeros."""
    if most is not None and most < least:
        return "[a&&b]"
    if most is None:
        size = len(str(least))
        longer = f"[1-9][0-9]{{{size},{max(_MOST_DIGITS, size + 5)}}}"
        return _either([_naturals(least, 10**size - 1), longer])
    parts = []
    while len(str(least)) < len(str(most)):  # one range per number of digits
        end = 10 ** len(str(least)) - 1
        parts.append(_same_size(str(least), str(end)))
        least = end + 1
    return _either([*parts, _same_size(str(least), str(most))])


def _same_size(least: str, most: str) -> str:
    if not least:
        return ""
    if set(least) == {"0"} and set(most) == {"9"}:
        return f"[0-9]{{{len(least)}}}"
    first, last, rest = int(least[0]), int(most[0]), len(least) - 1
    if first == last:
        return least[0] + _same_size(least[1:], most[1:])
    parts = []
    if set(least[1:]) - {"0"}:
        parts.append(least[0] + _same_size(least[1:], "9" * rest))
        first += 1
    if set(most[1:]) - {"9"}:
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    if last < int(most[0]):
        parts.append(most[0] + _same_size("0" * rest, most[1:]))
    return _either(parts)


def _rounded(bound: int | float | Decimal, up: bool) -> Decimal:
    """The bound, or a simpler one inside it: above it if `up`, else below it."""
    exact = Decimal(str(bound))
    size = exact.adjusted() + 1
    if size <= _LONGEST:
        return exact
    larger = up == (exact > 0)
    return Decimal(10).scaleb(size - 1 if larger else size - 2).copy_sign(exact)


def _split(bound: Decimal) -> tuple[str, str]:
    """The digits of the bound's absolute value before and after the point, without trailing zeros."""
    integral, _, fraction = format(abs(bound), "f").partition(".")
    return integral.lstrip("0") or "0", fraction.rstrip("0")


def _at_least(bound: Decimal, strictly: bool) -> str:
    if bound > 0 or (bound == 0 and not strictly):
        return f"/{_larger(bound, strictly)}/"
    if bound == 0:
        return f"/{_larger(bound, True)}/"
    return f"/(?:[0-9].*|-{_smaller(-bound, strictly)})/"


def _at_most(bound: Decimal, strictly: bool) -> str:
    if bound >= 0:
        inside = "" if bound == 0 and strictly else f"|{_smaller(bound, strictly)}"
        return f"/(?:-{_larger(Decimal(0), True)}{inside})/"
    return f"/-{_larger(-bound, strictly)}/"


def _larger(bound: Decimal, strictly: bool) -> str:
    """A regular expression for numbers without sign from the bound up; strictly: without the bound."""
    integral, fraction = _split(bound)
    size = len(integral)
    if size > _LONGEST:  # a power of ten
        return f"[1-9][0-9]{{{size - 1},}}(?:\\..*)?"
    parts = [f"[1-9][0-9]{{{size},}}(?:\\..*)?"]
    if set(integral) != {"9"}:
        parts.append(_same_size(str(int(integral) + 1), "9" * size) + r"(?:\..*)?")
    inside = [fraction[:at] + f"[{int(digit) + 1}-9][0-9]*" for at, digit in enumerate(fraction) if digit != "9"]
    inside.append(fraction + ("[0-9]*[1-9][0-9]*" if strictly else "[0-9]*"))
    parts.append(integral + rf"\.{_either(inside)}")
    if not strictly and not fraction:
        parts.append(integral)
    return _either(parts)


def _smaller(bound: Decimal, strictly: bool) -> str:
    """A regular expression for numbers without sign up to the bound; strictly: without the bound."""
    integral, fraction = _split(bound)
    parts = []
    if int(integral):
        parts.append(_naturals(0, int(integral) - 1) + r"(?:\.[0-9]*)?")
    inside = [fraction[:at] + f"[0-{int(digit) - 1}][0-9]*" for at, digit in enumerate(fraction) if digit != "0"]
    inside += [fraction[:at] for at in range(1, len(fraction))]
    if not strictly:
        inside.append(fraction + "0*")
    if inside:
        parts.append(integral + rf"\.{_either(inside)}")
    if fraction or not strictly:
        parts.append(integral)
    return _either(parts) if parts else "[a&&b]"


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"
