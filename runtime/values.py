"""Parses option values that are more than a word or a number. ValueError says what is wrong with a value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def integers(text: str) -> tuple[int, ...]:
    """Integers like 1,2,3; else ValueError."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{text!r} is not a list of integers like 1,2,3") from None


def numbers(text: str) -> tuple[float, ...]:
    """Positive numbers like 1,2,4; else ValueError."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (0.0,)
    if not min(found) > 0:
        raise ValueError(f"{text!r} is no list of positive numbers like 1,2,4")
    return found


def counts(text: str) -> tuple[int, ...]:
    """Positive integers like 1,8,16."""
    return tuple(int(number) for number in numbers(text))


def lengths(text: str) -> tuple[int, int]:
    """A length like 256, or a range like 64:512; returns both ends. ValueError for another text."""
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise ValueError(f"{text!r} is no length like 256, or range like 64:512")
    return found


def json_object(text: str) -> dict[str, Any]:
    """A JSON object; else ValueError."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("must be a JSON object")
    return found


def json_schema(text: str) -> dict[str, Any]:
    """A JSON schema, or @FILE with a file that contains one; else ValueError."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{text[1:]} cannot be read: {error}") from error
    try:
        return json_object(text)
    except RecursionError as error:
        raise ValueError("is nested too deep") from error


def stops_early(text: str) -> bool | str:
    """Whether a beam search stops early: true, false or never; else ValueError."""
    found = {"true": True, "false": False, "never": "never"}.get(text.lower())
    if found is None:
        raise ValueError("must be true, false or never")
    return found
