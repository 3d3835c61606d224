"""Reads answers that are a sequence of messages in channels, as in OpenAI's harmony.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json
<|message|>{…}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .parts import Parts
from .tape import Reading, Tape

MESSAGE, CHANNEL = "<|message|>", "<|channel|>"
_START = "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_TO = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


def read_messages(tape: Tape, parts: Parts, inside: bool) -> Reading[None]:
    """Read messages up to the end: thoughts, calls, and text. inside: whether the prompt has begun the text of the
    first message."""
    header = ""
    while not parts.full and (yield from tape.peek()):
        if not inside:
            header = yield from _read_header(tape, parts)
        inside = False
        called = _TO.search(header)
        if called and called[1] in parts.names:
            parts.begin(called[1])
            empty = yield from _read_body(tape, parts.argue)
            if empty:
                parts.argue("{}")
            parts.end_call(whole=not tape.ended)
        elif (channel := _CHANNEL_NAME.search(header)) and channel[1] == "analysis":
            parts.begin_thought()
            yield from _read_body(tape, parts.think)
            parts.end_thought()
        else:
            yield from _read_body(tape, parts.say)
    while (yield from tape.peek()):
        tape.take(len(tape.text))


def _read_header(tape: Tape, parts: Parts) -> Reading[str]:
    """Read the header before a message's text. Text without a header is part of the answer."""
    yield from tape.blanks()
    for beginning in (CHANNEL, _START, "to=", "<|constrain|>"):
        if (yield from tape.starts(beginning)):
            break
    else:
        return ""
    pieces: list[str] = []
    if (yield from tape.until([MESSAGE], pieces.append)):
        tape.take(len(MESSAGE))
    return "".join(pieces)


def _read_body(tape: Tape, give: Callable[[str], None]) -> Reading[bool]:
    """Pass on the text of a message; True if it was empty."""
    given: list[int] = []

    def count(text: str) -> None:
        given.append(len(text.strip()))
        give(text)

    mark = yield from tape.until(_ENDS, count)
    if mark and mark != _START:
        tape.take(len(mark))
    return not sum(given)
