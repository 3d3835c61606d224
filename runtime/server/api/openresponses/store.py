"""ResponseStore: responses that a later request may continue. In memory, bounded, and visible only to the client that
made them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..errors import HttpError
from .request import InputMessage, Item
from .resource import Response

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True)
class StoredResponse:
    """A response. items: the whole conversation that it answered, with the items of earlier responses; the last `given`
    items were in its own request."""

    response: Response
    items: list[Item]
    given: int

    @property
    def conversation(self) -> list[Item]:
        """The items before those of a request that continues this response."""
        said = msgspec.convert(msgspec.to_builtins(self.response.output), list[Item])
        return [*self.items, *said]

    def input_items(self) -> list[dict[str, Any]]:
        """The items of the response's own request, with ids, and with texts as lists of parts."""
        shown = []
        for place, item in enumerate(self.items[len(self.items) - self.given :]):
            fields = {"id": f"item_{self.response.id}_{place}", **msgspec.to_builtins(item)}
            if isinstance(item, InputMessage):
                fields["status"] = "completed"
                if isinstance(item.content, str):
                    kind = "output_text" if item.role == "assistant" else "input_text"
                    fields["content"] = [{"type": kind, "text": item.content}]
            shown.append(fields)
        return shown


class ResponseStore:
    """The most recently used responses, up to `max_bytes` of JSON. Older ones are dropped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, str], tuple[StoredResponse, int]] = OrderedDict()

    def add(self, client: str, response: Response, items: Sequence[Item], given: int) -> None:
        """Keep a response of a client. items: its conversation, of which the last `given` were in its own request."""
        stored = StoredResponse(response, list(items), given)
        size = len(_encoder.encode(response)) + len(_encoder.encode(stored.items))
        self._kept[client, response.id] = stored, size
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, (_, freed) = self._kept.popitem(last=False)
            self._bytes -= freed

    def find(self, client: str, response_id: str, param: str | None = None) -> StoredResponse:
        """The response. HttpError 404 if it was never stored, belongs to another client, or was dropped. param: the
        field that names it, None if the path does."""
        found = self._kept.get((client, response_id))
        if found is None:
            code = "previous_response_not_found" if param else "not_found"
            raise HttpError(404, f"there is no stored response {response_id[:80]!r} (any more)", param, code)
        self._kept.move_to_end((client, response_id))
        return found[0]

    def holds(self, client: str, response_id: str) -> bool:
        """Whether the store has a response of this client and id."""
        return (client, response_id) in self._kept

    def delete(self, client: str, response_id: str) -> None:
        """Remove a response. HttpError 404 if there is none of that id."""
        self.find(client, response_id)
        self._bytes -= self._kept.pop((client, response_id))[1]
