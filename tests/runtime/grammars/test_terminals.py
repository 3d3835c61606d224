"""Patterns and numbers as terminals, compared with Python's own."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from typing import Any

import pytest
from icc.runtime.errors import RequestError
from icc.runtime.grammars.characters import encoded
from icc.runtime.grammars.constraints import Grammars
from icc.runtime.grammars.languages import finite, is_empty
from icc.runtime.grammars.numbers import integers, numbers
from icc.runtime.grammars.patterns import ANY, between, compiled
from icc.runtime.grammars.sources import of_schema

from .walks import Walker


def matches(expression: str, text: str) -> bool:
    """Whether a terminal matches a text: their intersection is not empty."""
    escaped = "".join(f"\\x{{{ord(char):x}}}" for char in text)
    return not is_empty(f"({expression}) & /{escaped}/" if text else f'({expression}) & ""')


PATTERNS = {
    "^a*$": ["", "aa", "b", "ba"],
    "a|^b$": ["xa", "b", "cb"],
    r"^\d{3}-[A-Z]+": ["123-AB", "x123-A"],
    r'[^a-c"]': ['"', "a", "d", "é", "a\\", "\n"],
    r"^(?!foo)\w+$": ["foox", "xfoo", "_"],
    r"^(?=.*[A-Z])(?=.*\d).{4,8}$": ["abC1", "abcd1", "Abcd", "A1xxxxxxxxx"],
    r"^(https?|ftp)://[^\s/$.?#].[^\s]*$": ["http://x/y", "http:// x"],
    "^$|^x$": ["", "x", "xx"],
    "(^a|b$)": ["ac", "cb", "cac"],
    r"^[\w\-. /]+$": ["a-b /c", 'a"b'],
    r"^[^\d\s]+$": ["ab", "a1", "a b", "a\u2003"],
    r"\\": ["\\", "a"],
    "^.*$": ["a\nb", "ab"],
    r"^\S+$": ["a b", 'a"b', "\t", "\x7f"],
    r"^([a-z]+(?!-)$|1)": ["ab", "1x", "-"],
    r"\u00e9|\x41": ["é", "A", "u"],
    r"^x{2,}y?$": ["xx", "xxy", "x"],
    "^(?:a(?:b|$))*c?$": ["c", "abc"],
    r"^\/x\/$": ["/x/"],
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": ["1.50", "-0", "", "-.", "x"],  # pydantic's decimal
    "^(^a|b)": ["a", "b", "ca"],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_what_it_does_elsewhere(pattern: str) -> None:
    try:
        strict, loose = compiled(pattern), compiled(pattern, loose=True)
    except RequestError as error:
        assert "repeats a group" in error.message and "$))*" in pattern
        return
    for text in PATTERNS[pattern]:
        found = re.search(pattern, text) is not None
        assert matches(strict, encoded(text)) == matches(loose, encoded(text)) == found, text


def test_strict_and_loose_differ_where_implementations_do() -> None:
    for pattern, text in ((r"^\d$", "٣"), ("^a$", "a\n"), (r"^\s$", "\ufeff"), ("^.$", "\r")):
        assert not matches(compiled(pattern), encoded(text)) and matches(compiled(pattern, loose=True), encoded(text))
    for pattern, text in ((r"^\D$", "٣"), (r"^[^\w]$", "é")):
        assert not matches(compiled(pattern), encoded(text)) and matches(compiled(pattern, loose=True), encoded(text))


def test_a_string_has_one_way_to_be_written() -> None:
    assert encoded('a"\\\n\x01é') == 'a\\"\\\\\\n\\u0001é'
    assert matches(ANY, encoded('"\x00\x7f')) and not matches(ANY, '"') and not matches(ANY, "\\u0041")
    assert matches(between(1, 2), encoded("\n\n")) and not matches(between(1, 2), encoded("\n\n\n"))


def test_small_languages_are_told() -> None:
    assert finite(compiled("^[ab]{1,2}$"), 8) == ["a", "aa", "ab", "b", "ba", "bb"]
    assert finite(compiled("^[ab]{1,3}$"), 8) is None and finite(ANY, 8) is None


def number(chance: random.Random) -> Any:
    return chance.choice([None, chance.randint(-1500, 1500), Decimal(chance.randint(-99999, 99999)) / 1000])


@pytest.mark.parametrize("seed", range(12))
def test_bounds_hold_for_every_number_near_them(seed: int) -> None:
    chance = random.Random(seed)
    low, high = number(chance), number(chance)
    if low is not None and high is not None and low > high:
        low, high = high, low
    above, below = chance.random() < 0.4, chance.random() < 0.4
    whole, broken = integers(low, high), numbers(low, high, above, below)
    near = [bound for bound in (low, high, 0) if bound is not None]
    for value in [Decimal(bound) + Decimal(step) for bound in near for step in ("-1", "-.001", "0", ".001", "9")]:
        text = format(value, "f")
        inside = (low is None or value > low or (value == low and not above)) and (
            high is None or value < high or (value == high and not below)
        )
        assert matches(broken, text) == inside or (value == 0 and text[0] == "-"), (low, high, text)
        if value == int(value):
            inside = (low is None or value >= low) and (high is None or value <= high)
            assert matches(whole, str(int(value))) == inside, (low, high, value)


def test_large_bounds_are_exact_and_huge_ones_stay_inside() -> None:
    assert matches(integers(2**70, 2**80), str(2**70)) and not matches(integers(2**70, 2**80), str(2**70 - 1))
    assert not matches(integers(2**70, 2**80), str(2**80 + 1))
    assert matches(numbers(1e300, None), "9" * 302) and not matches(numbers(1e300, None), "9" * 299)
    assert not matches(numbers(None, None), "1e999") and matches(numbers(None, None), "-1.5e10")


def test_tokens_without_bytes_are_refused_in_a_line(walker: Walker) -> None:
    """A tokenizer without a decoder does not tell how its tokens become text."""
    facts = json.loads(walker.tokenizer.to_str()) | {"decoder": None}
    grammars = Grammars(json.dumps(facts), walker.size, [walker.end])
    with pytest.raises(RequestError, match="cannot read the model's tokenizer"):
        grammars.compile(of_schema(True))
