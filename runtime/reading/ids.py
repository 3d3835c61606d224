"""Ids of calls in the forms that templates accept."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from .formats import AnswerFormat
from .parts import any_id


def maker_of_ids(form: AnswerFormat, calls_before: int) -> Callable[[str, int], str]:
    """A function that makes a call's id from its name and its index in the answer. calls_before: the number of earlier
    calls in the conversation."""
    if form.ids == "short":
        return lambda name, index: secrets.token_hex(5)[:9]
    if form.ids == "named":
        return lambda name, index: f"functions.{name}:{calls_before + index}"
    return any_id
