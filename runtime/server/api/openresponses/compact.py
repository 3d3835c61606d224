"""Compaction: the model summarizes a conversation, and a later request begins with the summary."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from ...engine.messages import Delta
from .. import limits
from ..errors import HttpError
from ..fields import Text
from ..generate import AnswerWriter
from .answer import ResponsesAnswer
from .request import Id, InputMessage, Item, ResponsesRequest, typed_messages
from .resource import ResponseUsage

_ASKED = (
    "Summarize the conversation so far for whoever goes on with it: what was asked, found, decided and promised, with "
    "all names, numbers and open questions. Write the summary only."
)
_LONGEST = 2048  # the most tokens of a summary


class CompactRequest(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /v1/responses/compact. `prompt_cache_key` is accepted and ignored."""

    model: str = ""
    input: Text | Annotated[list[Item], Meta(max_length=limits.MESSAGES)] | None = None
    previous_response_id: Id | None = None
    instructions: Text | None = None
    prompt_cache_key: str | None = None

    prepare = staticmethod(typed_messages)


class KeptText(Struct, tag_field="type", tag="input_text"):
    """A text of the input."""

    text: str


class KeptMessage(Struct, tag_field="type", tag="message"):
    """A system message, which is kept unchanged."""

    id: str
    role: Literal["system", "developer"]
    content: list[KeptText]
    status: Literal["completed"] = "completed"


class Compaction(Struct, tag_field="type", tag="compaction"):
    """The summary. `encrypted_content` is for this server to read; it is encoded, not secret."""

    id: str
    encrypted_content: str


class CompactedResponse(Struct):
    """Answer of /v1/responses/compact: items that replace the conversation in a later request."""

    id: str
    output: list[KeptMessage | Compaction]
    created_at: int
    usage: ResponseUsage
    object: Literal["response.compaction"] = "response.compaction"


def summarizing(request: CompactRequest, items: Sequence[Item], longest: int) -> ResponsesRequest:
    """The request for a summary of these items. longest: tokens of the model's context."""
    return ResponsesRequest(
        model=request.model,
        input=[*items, InputMessage("user", _ASKED)],
        instructions=request.instructions,
        max_output_tokens=max(min(_LONGEST, longest // 4), 1),
        truncation="auto",
        store=False,
    )


class CompactAnswer(AnswerWriter):
    """Makes the answer of a request for a summary."""

    def __init__(self, answer: ResponsesAnswer, items: Sequence[Item]) -> None:
        self._answer = answer
        self._kept = [item for item in items if isinstance(item, InputMessage) and item.role in ("system", "developer")]

    def whole(self, deltas: Sequence[Delta]) -> CompactedResponse:
        response = self._answer.whole(deltas)
        content = base64.b64encode(response.output_text.strip().encode()).decode()
        output: list[KeptMessage | Compaction] = [
            KeptMessage(f"msg_{uuid.uuid4().hex}", item.role, [KeptText(item.said)])  # type: ignore[arg-type]
            for item in self._kept
        ]
        assert response.usage is not None
        return CompactedResponse(
            f"resp_{uuid.uuid4().hex}",
            [*output, Compaction(f"cmp_{uuid.uuid4().hex}", content)],
            int(time.time()),
            response.usage,
        )

    # it is never streamed

    def begin(self) -> Sequence[Struct]:
        return []

    def chunks(self, deltas: Sequence[Delta]) -> Sequence[Struct]:
        return self._answer.chunks(deltas)

    def end(self) -> Sequence[Struct]:
        return self._answer.end()

    def failed(self, error: HttpError) -> Sequence[Struct]:
        return self._answer.failed(error)
