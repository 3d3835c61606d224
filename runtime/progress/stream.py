"""The display that fits a stream."""

from __future__ import annotations

import sys
from typing import TextIO

from .display import Display
from .lines import LineDisplay


def open_display(stream: TextIO | None = None) -> Display:
    """A display on this stream, standard error by default: bars on a terminal where rich is installed, else lines."""
    chosen = sys.stderr if stream is None else stream
    if not chosen.isatty():
        return LineDisplay(chosen)
    try:
        from .bars import Bars
    except ModuleNotFoundError:  # an engine where only what it needs is installed
        return LineDisplay(chosen)
    return Bars(chosen)
