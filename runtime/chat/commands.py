"""The /commands of a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .history import History
from .session import SETTINGS, Session


class Next(Enum):
    """What the conversation does after a command."""

    READ = "read"  # read the next line
    ANSWER = "answer"  # let the model answer again
    LEAVE = "leave"


@dataclass(frozen=True)
class _Command:
    names: tuple[str, ...]
    argument: str
    help: str
    run: Callable[[Session, str], tuple[Next, str]]


def run_command(session: Session, line: str) -> tuple[Next, str]:
    """Run a line that begins with a slash; returns what to do next and a message for the user. IccError if it
    failed."""
    name, _, argument = line[1:].partition(" ")
    for command in _COMMANDS:
        if name.lower() in command.names:
            if argument.strip() and not command.argument:
                raise UsageError(f"/{name} takes nothing")
            return command.run(session, argument.strip())
    raise UsageError(f"/{name} is no command", "/help lists them; a message that begins with / needs // there")


def _help(session: Session, argument: str) -> tuple[Next, str]:
    lines = []
    for command in _COMMANDS:
        lines.append(f"  {' '.join(filter(None, ['/' + command.names[0], command.argument])):24}{command.help}")
    lines += ['  """                     begins and ends a message of several lines']
    lines += ["  Ctrl-C                  stops the answer; Ctrl-D leaves"]
    return Next.READ, "\n".join(lines)


def _reset(session: Session, argument: str) -> tuple[Next, str]:
    session.history.reset()
    return Next.READ, "a new conversation"


def _system(session: Session, text: str) -> tuple[Next, str]:
    if text:
        session.history.system = "" if text == "none" else text
    return Next.READ, f"system: {session.history.system or 'none'}"


def _save(session: Session, name: str) -> tuple[Next, str]:
    session.history.save(_file(name))
    return Next.READ, f"saved to {name}"


def _load(session: Session, name: str) -> tuple[Next, str]:
    session.history = History.load(_file(name))
    return Next.READ, f"{len(session.history.messages)} messages of {name}"


def _file(name: str) -> Path:
    if not name:
        raise UsageError("which file?", "give its name behind the command")
    return Path(name).expanduser()


def _regenerate(session: Session, argument: str) -> tuple[Next, str]:
    if not session.history.unanswered():
        raise UsageError("there is nothing to answer yet")
    return Next.ANSWER, ""


def _set(session: Session, argument: str) -> tuple[Next, str]:
    name, _, text = argument.partition(" ")
    if not name:
        defaults = session.defaults()
        return Next.READ, "\n".join(f"  {n} = {_shown(session.settings.get(n, defaults.get(n)))}" for n in SETTINGS)
    if not text.strip():
        raise UsageError(f"which {name}?", f"/set {name} VALUE, or `default`")
    session.set(name, None if text.strip() == "default" else _value(name, text.strip()))
    return Next.READ, f"{name} = {_shown(session.settings.get(name, session.defaults().get(name)))}"


def _value(name: str, text: str) -> Any:
    if name in ("regex", "grammar"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _shown(value: object) -> str:
    return "default" if value is None else json.dumps(value, ensure_ascii=False)


def _history(session: Session, argument: str) -> tuple[Next, str]:
    return Next.READ, "\n".join(f"{m['role']}: {m['content']}" for m in session.history.messages) or "nothing was said"


def _stats(session: Session, argument: str) -> tuple[Next, str]:
    answer = session.last
    if answer is None:
        return Next.READ, "nothing was answered yet"
    rate = answer.tokens / answer.seconds if answer.seconds else 0.0
    return Next.READ, (
        f"{answer.tokens} tokens in {answer.seconds:.2f} s ({rate:.1f} tok/s), ended by {answer.reason}; prompt of "
        f"{answer.prompt_tokens} tokens, {answer.cached} of them from the cache; context {session.context} tokens"
    )


def _quit(session: Session, argument: str) -> tuple[Next, str]:
    return Next.LEAVE, ""


_COMMANDS = (
    _Command(("help", "?"), "", "this", _help),
    _Command(("reset", "clear", "new"), "", "begin a new conversation", _reset),
    _Command(("system",), "[TEXT|none]", "show or change the system message", _system),
    _Command(("regenerate", "retry"), "", "answer the last message again", _regenerate),
    _Command(("set",), "[NAME VALUE]", "show or change sampling: /set temperature 0.7", _set),
    _Command(("save",), "FILE", "write the conversation as JSON", _save),
    _Command(("load",), "FILE", "go on with a conversation that was saved", _load),
    _Command(("history",), "", "the conversation so far", _history),
    _Command(("stats",), "", "how fast the last answer came", _stats),
    _Command(("quit", "exit", "bye"), "", "leave", _quit),
)
