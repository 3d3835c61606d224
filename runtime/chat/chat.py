"""`icc chat`: read, answer, read again."""

from __future__ import annotations

from typing import Any

from ..errors import IccError
from ..llm import LLM
from .commands import Next, run_command
from .interrupt import Interrupt
from .session import Session
from .terminal import Terminal


def chat(llm: LLM, system: str = "", settings: dict[str, Any] | None = None, markdown: bool = True) -> int:
    """Hold a conversation with a model until the user leaves, and return the exit code. settings: see `Session`.

    The exit code is 0 at a terminal; through a pipe it is that of the last line that failed. IccError if the engine
    cannot hold a conversation.
    """
    session, terminal = Session(llm, system, settings), Terminal(markdown)
    if terminal.interactive:
        terminal.note(f"{_about(llm)}. /help lists commands, Ctrl-D leaves.")
    code = 0
    while True:
        try:
            line = terminal.read()
        except KeyboardInterrupt:
            if not terminal.interactive:
                raise
            terminal.note("\n(Ctrl-D or /quit leaves)")
            continue
        if line is None:
            return code
        try:
            if not _take(session, terminal, line):
                return code
        except IccError as error:
            terminal.error(error)
            code = 0 if terminal.interactive else error.exit_code


def _take(session: Session, terminal: Terminal, line: str) -> bool:
    """Handle one line of input; False if it is the command to leave."""
    if not line.strip():
        return True
    if line.startswith("/") and not line.startswith("//"):
        following, said = run_command(session, line)
        terminal.note(said)
        if following is Next.ANSWER:
            _answer(session, terminal, None)
        return following is not Next.LEAVE
    _answer(session, terminal, line[1:] if line.startswith("//") else line)
    return True


def _answer(session: Session, terminal: Terminal, text: str | None) -> None:
    shown = None

    def show(piece: str) -> None:
        nonlocal shown
        if shown is None:
            shown = terminal.answer()
        shown.write(piece)

    with Interrupt() as interrupt:
        try:
            if text is None:
                answer = session.answer(show, interrupt.asked)
            else:
                answer = session.ask(text, show, interrupt.asked)
        finally:
            if shown is not None:
                shown.close()
    if answer.forgotten:
        turns = "turn is" if answer.forgotten == 1 else f"{answer.forgotten} turns are"
        terminal.note(f"(the oldest {turns} forgotten: the context has room for {session.context} tokens)")
    if answer.reason == "abort":
        terminal.note("(stopped)")
    elif answer.reason == "length":
        terminal.note(f"(cut: {'the context is full' if answer.fills_context else 'max_tokens is reached, see /set'})")
    elif not answer.text:
        terminal.note("(no answer)")


def _about(llm: LLM) -> str:
    model = llm.manifest.model
    name = llm.engine.path.resolve().name if llm.engine else model.architecture
    return f"{name}: {_count(model.num_parameters)} parameters, context of {llm.manifest.limits.max_seq_len} tokens"


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
