"""Markdown that is shown while it is written: what is finished stays, the block at the end is drawn anew."""

from __future__ import annotations

import re
import time

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

_EVERY_S = 0.08  # between two drawings
_FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)
# a line that can only begin a new block: nothing indented and no list item, which may go on with what is above
_BEGINS = re.compile(r"\n[ \t]*\n(?=[^\s\-*+\d>|])")


def finished(text: str) -> int:
    """How many characters of a Markdown text, as far as it is written, no longer change by what follows."""
    for match in reversed(list(_BEGINS.finditer(text))):
        if len(_FENCE.findall(text, 0, match.start())) % 2 == 0:
            return match.end()
    return 0


class MarkdownStream:
    """One text on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rest, self._drawn = "", 0.0
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def write(self, piece: str) -> None:
        """Take a piece of the text. What is complete is printed and stays; the rest is drawn again, a few times per
        second."""
        self._rest += piece
        if time.monotonic() - self._drawn < _EVERY_S:
            return
        done = finished(self._rest)
        if done:
            self._live.console.print(Markdown(self._rest[:done]))
            self._live.console.print()
            self._rest = self._rest[done:]
        self._live.update(_End(self._rest), refresh=True)
        self._drawn = time.monotonic()

    def close(self) -> None:
        """Show what is left, and leave it there."""
        self._live.update(Markdown(self._rest), refresh=False)
        self._live.stop()


class _End:
    """The last lines of a block that is higher than the terminal."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(Markdown(self._text), options, pad=False)
        for line in lines[-max(console.height - 2, 1) :]:
            yield from line
            yield Segment.line()
