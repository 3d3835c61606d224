"""Conversations: from a request of /v1/responses to a job and its answer, with what earlier responses left."""

from __future__ import annotations

from collections.abc import Callable

from ...engine.engine_client import Stream
from .. import limits
from ..jobs import Job, Jobs
from ..model import ServedModel
from ..requests import ChatRequest
from .answer import ResponsesAnswer
from .chat import chat_request, items_of
from .request import InputMessage, Item, ResponsesRequest
from .resource import Response
from .store import ResponseStore

_SYSTEM = ("system", "developer")


class Conversations:
    """What /v1/responses knows beside one request: the responses that it keeps."""

    def __init__(self, model: ServedModel, jobs: Jobs) -> None:
        self._model, self._jobs = model, jobs
        self.store = ResponseStore(limits.STORED_BYTES)

    async def begin(self, request: ResponsesRequest, client: str) -> tuple[Job, Callable[[Stream], ResponsesAnswer]]:
        """The job, and what makes its answer. HttpError or RequestError for what a client has wrong."""
        items, chat = await self._chat(request, client)
        job = await self._jobs.chat(chat, client)
        given = len(items_of(request))

        def keep(response: Response) -> None:
            if response.store and response.error is None:
                self.store.add(client, response, items, given)

        return job, lambda stream: ResponsesAnswer(self._model, request, chat, job, stream, keep)

    async def count(self, request: ResponsesRequest, client: str) -> int:
        """The tokens of the prompt."""
        _, chat = await self._chat(request, client)
        return len(await self._jobs.chat_tokens(chat))

    async def _chat(self, request: ResponsesRequest, client: str) -> tuple[list[Item], ChatRequest]:
        """All items of the conversation, and the request for its next turn."""
        items = items_of(request)
        if request.previous_response_id is not None:
            found = self.store.find(client, request.previous_response_id, "previous_response_id")
            items = [*found.conversation, *items]
        chat = chat_request(request, items)
        if request.truncation == "auto" and not await self._fits(chat):
            chat = await self._truncated(request, items)
        return items, chat

    async def _truncated(self, request: ResponsesRequest, items: list[Item]) -> ChatRequest:
        """The request without as many turns at the beginning as it takes for the rest to fit; the last one stays."""
        turns = [place for place, item in enumerate(items) if isinstance(item, InputMessage) and item.role == "user"]
        low, high = 1, max(len(turns) - 1, 1)  # the rest from the turn `high` on fits, or is the least there is
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


def _from(items: list[Item], place: int) -> list[Item]:
    """The items from a place on, and of those before it what the system said."""
    before = [item for item in items[:place] if isinstance(item, InputMessage) and item.role in _SYSTEM]
    return [*before, *items[place:]]
