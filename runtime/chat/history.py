"""History: the messages of a conversation, and the file that keeps them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..templates.messages import prepared

Message = dict[str, Any]


class History:
    """An optional system message and the turns. A turn is a user's message and all messages up to the next one."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.turns: list[list[Message]] = []

    @property
    def messages(self) -> list[Message]:
        """All messages in order, as a chat template takes them."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *(message for turn in self.turns for message in turn)]

    def ask(self, text: str) -> None:
        """Begin a turn with a user's message."""
        self.turns.append([{"role": "user", "content": text}])

    def answer(self, text: str) -> None:
        """Add an answer to the last turn."""
        self.turns[-1].append({"role": "assistant", "content": text})

    def unanswered(self) -> bool:
        """Remove the answer of the last turn, so that the model can answer again; False if there is no turn."""
        if not self.turns:
            return False
        del self.turns[-1][1:]
        return True

    def take_back(self) -> None:
        """Forget the last turn."""
        del self.turns[-1:]

    def forget_oldest(self) -> bool:
        """Forget the oldest turn, unless it is the only one; False in that case."""
        if len(self.turns) < 2:
            return False
        del self.turns[0]
        return True

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns.clear()

    # -- files -------------------------------------------------------------------------------------------------------

    def save(self, file: Path) -> None:
        """Write the messages as JSON in the form of OpenAI's API; an old file stays if this fails. UsageError if it
        fails."""
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n"
        stage = file.with_name(f".{file.name}.{os.getpid()}.partial")
        try:
            try:
                stage.write_text(text, encoding="utf-8", errors="replace")
                os.replace(stage, file)
            finally:
                stage.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"{file} cannot be written: {error.strerror}") from error

    @classmethod
    def load(cls, file: Path) -> History:
        """Read a conversation from a file that `save` wrote, or that holds a list of messages. UsageError if it is
        neither."""
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{file} is not JSON: {error}") from error
        messages = prepared(found.get("messages", ()) if isinstance(found, Mapping) else found)
        history = cls()
        if messages[0]["role"] == "system":
            history.system = messages.pop(0)["content"]
        for message in messages:
            if message["role"] == "user" or not history.turns:
                history.turns.append([])
            history.turns[-1].append(message)
        return history
