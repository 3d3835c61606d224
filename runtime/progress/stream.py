"""Chooses the display for a stream."""

from __future__ import annotations

import sys
from typing import TextIO

from .display import Display
from .lines import LineDisplay


def open_display(stream: TextIO | None = None) -> Display:
    """A display on a stream (None: standard error): bars on a terminal if rich is installed, else lines."""
    chosen = sys.stderr if stream is None else stream
    if not chosen.isatty():
        return LineDisplay(chosen)
    try:
        from .bars import Bars
    except ModuleNotFoundError:  # an engine may run with only its own requirements installed
        return LineDisplay(chosen)
    return Bars(chosen)
