"""Checks that an engine that was just written gives its canary answers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ...runtime.errors import MissingIsaError
from ...runtime.loading import load


def check_answers(engine: Path) -> None:
    """Raise WrongAnswersError unless a CPU engine gives its canary answers. Not checked if this CPU lacks its
    instructions."""
    with suppress(MissingIsaError):
        load(engine, verify_answers=True).close()
