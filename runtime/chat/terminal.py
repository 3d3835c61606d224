"""Input and output of a conversation: a terminal with Markdown, one without, or a pipe."""

from __future__ import annotations

import sys
from typing import Protocol

from ..errors import IccError

_PROMPT, _MORE, _QUOTES = ">>> ", "... ", '"""'


class Shown(Protocol):
    """An answer that is being written."""

    def write(self, piece: str) -> None:
        """Show the next part of the answer."""
        ...

    def close(self) -> None:
        """End the answer, which is complete or was interrupted."""
        ...


class Terminal:
    """Reads lines and shows answers. Through a pipe, standard output gets the answers only: there are no prompts, and
    all other messages go to standard error.

    markdown: show answers as Markdown, where there is a terminal and rich is installed.
    """

    def __init__(self, markdown: bool = True) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._markdown = markdown and sys.stdout.isatty()
        if self.interactive:
            try:
                import readline  # input() edits lines with it  # noqa: F401
            except ImportError:
                pass

    def read(self) -> str | None:
        """The next message or command; None at the end. KeyboardInterrupt at a terminal."""
        line = self._line(_PROMPT)
        if line is None or not line.lstrip().startswith(_QUOTES):
            return line
        lines = [line.lstrip().removeprefix(_QUOTES)]
        while not lines[-1].rstrip().endswith(_QUOTES):
            more = self._line(_MORE)
            if more is None:
                return "\n".join(lines)
            lines.append(more)
        lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str | None:
        if not self.interactive:
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        try:
            return input(prompt)
        except EOFError:
            print()
            return None

    def answer(self) -> Shown:
        """A writer for the next answer: with Markdown if that is wanted and rich is installed, else plain."""
        if self._markdown:
            try:
                from rich.console import Console

                from .markdown import MarkdownStream
            except ImportError:
                self._markdown = False
            else:
                return MarkdownStream(Console())
        return _Plain()

    def note(self, text: str) -> None:
        """Print a message that is not an answer; "" prints nothing."""
        if text:
            print(text, file=sys.stdout if self.interactive else sys.stderr, flush=True)

    def error(self, error: IccError) -> None:
        """Print an error and its hint on standard error."""
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.stderr.flush()


class _Plain:
    """Writes text unchanged."""

    def write(self, piece: str) -> None:
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(piece.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()

    def close(self) -> None:
        print(flush=True)
