"""Shows Markdown while it is generated: finished blocks stay, the last block is drawn again."""

from __future__ import annotations

import re
import time

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

_EVERY_S = 0.08  # seconds between two drawings
_FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)
# a line that can only begin a new block: no indented line and no list item, for these may continue the block above
_BEGINS = re.compile(r"\n[ \t]*\n(?=[^\s\-*+\d>|])")


def finished(text: str) -> int:
    """How many characters of an incomplete Markdown text are rendered the same whatever text follows."""
    for match in reversed(list(_BEGINS.finditer(text))):
        if len(_FENCE.findall(text, 0, match.start())) % 2 == 0:
            return match.end()
    return 0


class MarkdownStream:
    """Shows one text on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rest, self._drawn = "", 0.0
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def write(self, piece: str) -> None:
        """Take the next part of the text. Complete blocks are printed and stay; the rest is drawn again a few times per
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
        """Print the rest of the text."""
        self._live.update(Markdown(self._rest), refresh=False)
        self._live.stop()


class _End:
    """Renders the last lines of a block that is higher than the terminal."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(Markdown(self._text), options, pad=False)
        for line in lines[-max(console.height - 2, 1) :]:
            yield from line
            yield Segment.line()
