"""Conversations: makes the job and the answer of a request of /v1/responses, with the items of earlier responses."""

from __future__ import annotations

from collections.abc import Callable

from ...engine.engine_stream import EngineStream
from .. import limits
from ..errors import HttpError
from ..jobs import Job, Jobs
from ..model import ServedModel
from ..requests import ChatRequest
from .answer import ResponsesAnswer
from .chat import chat_request, items_of
from .compact import CompactAnswer, CompactRequest, summarizing
from .request import FunctionCallItem, FunctionCallOutput, InputMessage, Item, ResponsesRequest
from .resource import Response
from .store import ResponseStore

_SYSTEM = ("system", "developer")


class Conversations:
    """The stored responses, and the jobs of requests that may continue them."""

    def __init__(self, model: ServedModel, jobs: Jobs) -> None:
        self._model, self._jobs = model, jobs
        self.store = ResponseStore(limits.STORED_BYTES)

    async def begin(
        self, request: ResponsesRequest, client: str, local: ResponseStore | None = None
    ) -> tuple[Job, Callable[[EngineStream], ResponsesAnswer]]:
        """The job, and a function that makes the writer of its answer. local: where a connection keeps responses that
        are not to be stored; None: nowhere. HttpError or RequestError for a client's mistake."""
        items, chat = await self._chat(request, client, local)
        job = await self._jobs.chat(chat, client)
        given = len(items_of(request))

        def keep(response: Response) -> None:
            store = self.store if response.store else local
            if store is not None and response.error is None:
                store.add(client, response, items, given)

        return job, lambda stream: ResponsesAnswer(self._model, request, chat, job, stream, keep)

    async def compact(
        self, request: CompactRequest, client: str
    ) -> tuple[Job, Callable[[EngineStream], CompactAnswer]]:
        """The job that summarizes a conversation, and a function that makes the writer of its answer. HttpError 400 if
        the conversation is empty."""
        items = self._before(request.previous_response_id, client, None)
        given = request.input or []
        items += [InputMessage("user", given)] if isinstance(given, str) else given
        if not items:
            raise HttpError(400, "input: there is nothing to compact", "input", "conflicting_fields")
        asked = summarizing(request, items, self._model.max_len)
        _, chat = await self._chat(asked, client)
        job = await self._jobs.chat(chat, client)

        def make(stream: EngineStream) -> CompactAnswer:
            return CompactAnswer(ResponsesAnswer(self._model, asked, chat, job, stream, lambda response: None), items)

        return job, make

    async def count(self, request: ResponsesRequest, client: str) -> int:
        """The number of tokens of the prompt."""
        _, chat = await self._chat(request, client)
        return len(await self._jobs.chat_tokens(chat))

    def _before(self, previous: str | None, client: str, local: ResponseStore | None) -> list[Item]:
        """The conversation up to and including an earlier response; [] if `previous` is None."""
        if previous is None:
            return []
        store = local if local is not None and local.holds(client, previous) else self.store
        return store.find(client, previous, "previous_response_id").conversation

    async def _chat(
        self, request: ResponsesRequest, client: str, local: ResponseStore | None = None
    ) -> tuple[list[Item], ChatRequest]:
        """All items of the conversation, and the request for its next turn."""
        items = items_of(request)
        if request.previous_response_id is not None:
            items = [*self._before(request.previous_response_id, client, local), *items]
            _check_outputs(items)
        chat = chat_request(request, items)
        if request.truncation == "auto" and not await self._fits(chat):
            chat = await self._truncated(request, items)
        return items, chat

    async def _truncated(self, request: ResponsesRequest, items: list[Item]) -> ChatRequest:
        """The request without its oldest turns, as few as need be for the rest to fit; the last turn stays."""
        turns = [place for place, item in enumerate(items) if isinstance(item, InputMessage) and item.role == "user"]
        low, high = 1, max(len(turns) - 1, 1)  # the turns from `high` on fit, or are the fewest possible
        while low < high:
            middle = (low + high) // 2
            if await self._fits(chat_request(request, _from(items, turns[middle]))):
                high = middle
            else:
                low = middle + 1
        return chat_request(request, _from(items, turns[min(low, len(turns) - 1)] if turns else 0))

    async def _fits(self, chat: ChatRequest) -> bool:
        reserved = min(chat.max_completion_tokens or 1, self._model.max_len // 2)
        return len(await self._jobs.chat_tokens(chat)) + reserved <= self._model.max_len


def _check_outputs(items: list[Item]) -> None:
    """HttpError 400 for the result of a call that is not in the conversation."""
    called = {item.call_id for item in items if isinstance(item, FunctionCallItem)}
    for item in items:
        if isinstance(item, FunctionCallOutput) and item.call_id not in called:
            message = f"input: there is no call {item.call_id[:80]!r} in the conversation"
            raise HttpError(400, message, "input", "invalid_value")


def _from(items: list[Item], place: int) -> list[Item]:
    """The items from index `place` on, and the system messages before it."""
    before = [item for item in items[:place] if isinstance(item, InputMessage) and item.role in _SYSTEM]
    return [*before, *items[place:]]
