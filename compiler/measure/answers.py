"""Whether an engine that was just written gives its canary answers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ...runtime.errors import MissingIsaError
from ...runtime.loading import load


def check_answers(engine: Path) -> None:
    """WrongAnswersError unless a CPU engine gives them; not looked at where this CPU has not its instructions."""
    with suppress(MissingIsaError):
        load(engine, verify_answers=True).close()
