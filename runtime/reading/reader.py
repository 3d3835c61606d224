"""AnswerReader: splits a streamed answer into text, thoughts and calls."""

from __future__ import annotations

from collections.abc import Callable

from .calls import Schemas, read_calls
from .formats import AnswerFormat
from .messages import read_messages
from .parts import Part, Parts, any_id
from .tape import Reading, Tape


class AnswerReader:
    """Reads one answer. schemas: of the parameters of the tools that may be called, by tool; None: there are no tools.
    most: how many calls are wanted; None: any number. thinking: whether the prompt ends inside a thought; begun:
    whether it ends inside the answer's text."""

    def __init__(
        self,
        form: AnswerFormat,
        schemas: Schemas | None = None,
        most: int | None = None,
        *,
        thinking: bool = False,
        begun: bool = False,
        make_id: Callable[[str, int], str] = any_id,
    ) -> None:
        self._tape = Tape()
        self._parts = Parts(schemas or (), most, form.hidden if form.special else (), make_id)
        self._reading = self._read(form, schemas or {}, thinking, begun)
        next(self._reading, None)

    @property
    def full(self) -> bool:
        """Whether all calls that are wanted have ended, so that the answer can be stopped."""
        return self._parts.full

    @property
    def calls(self) -> int:
        """The number of calls that have begun."""
        return self._parts.calls

    @property
    def thinking(self) -> bool:
        """Whether a thought is open."""
        return self._parts.thinking

    def push(self, piece: str) -> list[Part]:
        """The new parts after one more chunk of the answer."""
        self._tape.feed(piece)
        next(self._reading, None)
        return self._parts.take()

    def finish(self) -> list[Part]:
        """The remaining parts at the end of the answer."""
        self._tape.ended = True
        next(self._reading, None)
        return self._parts.take()

    def _read(self, form: AnswerFormat, schemas: Schemas, thinking: bool, begun: bool) -> Reading[None]:
        tape, parts = self._tape, self._parts
        yield
        if form.messages:
            yield from read_messages(tape, parts, begun)
        else:
            if form.thinking is not None:
                yield from _read_thought(tape, parts, form.thinking.open, form.thinking.close, thinking)
            if form.calls is not None and schemas:
                yield from read_calls(tape, parts, form.calls, schemas)
            else:
                yield from tape.until((), parts.say)
        parts.end()


def _read_thought(tape: Tape, parts: Parts, opening: str, closing: str, inside: bool) -> Reading[None]:
    """Read the thought at the beginning of an answer, if there is one."""
    if not inside:
        tape.keep()
        yield from tape.blanks()
        inside = yield from tape.skip(opening)
        if not inside:
            tape.put_back()
            return
        tape.forget()
    parts.begin_thought()
    if (yield from tape.until([closing], parts.think)):
        tape.take(len(closing))
    parts.end_thought()
