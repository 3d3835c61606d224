"""RequestGate: who may send requests, and whether requests are accepted now; the same for every protocol."""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.admission import Admission
from .errors import HttpError
from .keys import ApiKeys


class RequestGate:
    """The checks before every request: API key, shutdown, full queue."""

    def __init__(self, keys: ApiKeys, admission: Admission) -> None:
        self._keys, self._admission = keys, admission
        self.draining = False

    def client(self, authorization: Sequence[str], api_key: Sequence[str]) -> str:
        """The name of the client, from the only header that holds a key: Authorization, or x-api-key of Anthropic's
        clients. HttpError 401 without an accepted key."""
        given = [*authorization, *[f"Bearer {key}" for key in api_key]]
        client = self._keys.client(given[0].encode("latin-1", "replace") if len(given) == 1 else None)
        if client is None:
            raise HttpError(401, "give an API key: Authorization: Bearer KEY", code="invalid_api_key")
        return client

    def check_running(self) -> None:
        """HttpError 503 once the server shuts down."""
        if self.draining:
            raise HttpError(503, "the server is shutting down", code="draining", retry_after=5)

    def check_room(self) -> None:
        """Overloaded if the queue is full; checked first, so that a refusal costs little."""
        self._admission.check_room()
