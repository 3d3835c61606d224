"""RequestGate: who may ask, and whether anything is taken up now; the same however a request comes."""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.admission import Admission
from .errors import HttpError
from .keys import ApiKeys


class RequestGate:
    """What stands before every request: keys, a server that shuts down, and a full queue."""

    def __init__(self, keys: ApiKeys, admission: Admission) -> None:
        self._keys, self._admission = keys, admission
        self.draining = False

    def client(self, authorization: Sequence[str], api_key: Sequence[str]) -> str:
        """The name of who asks, by the one header that holds a key: Authorization, or x-api-key as Anthropic's clients
        send it. HttpError 401 for none that is accepted."""
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
        """Overloaded if the queue is full: a refusal must not cost what the request would."""
        self._admission.check_room()
