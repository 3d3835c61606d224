"""Ids of calls, as templates take them."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from .formats import AnswerFormat
from .parts import any_id


def maker_of_ids(form: AnswerFormat, calls_before: int) -> Callable[[str, int], str]:
    """Gives a call its id, by its name and its index in the answer. calls_before: those of the conversation so far."""
    if form.ids == "short":
        return lambda name, index: secrets.token_hex(5)[:9]
    if form.ids == "named":
        return lambda name, index: f"functions.{name}:{calls_before + index}"
    return any_id
