"""The server's request parser without a socket: its protocol over a transport that keeps what is written, and the
schemas of all bodies."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

import uvicorn
from icc.runtime.errors import IccError
from icc.runtime.server.api.anthropic.request import CountTokensRequest, MessagesRequest
from icc.runtime.server.api.decisions.request import DecisionRequest
from icc.runtime.server.api.decoding import decoded
from icc.runtime.server.api.errors import ClientGone, HttpError
from icc.runtime.server.api.ollama.request import OllamaChatRequest, OllamaEmbedRequest, OllamaGenerateRequest
from icc.runtime.server.api.openresponses.request import ResponsesRequest
from icc.runtime.server.api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    RerankRequest,
    TokenizeRequest,
)  # fmt: skip
from icc.runtime.server.http.access import AccessLog
from icc.runtime.server.http.bodies import error_response, read_body
from icc.runtime.server.http.http_protocol import HttpProtocol
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from uvicorn.server import ServerState

KINDS: tuple[type, ...] = (
    CompletionRequest, ChatRequest, EmbeddingRequest, RerankRequest, TokenizeRequest, DetokenizeRequest,
    LoadAdapterRequest, MessagesRequest, CountTokensRequest, ResponsesRequest, DecisionRequest, OllamaChatRequest,
    OllamaGenerateRequest, OllamaEmbedRequest,
)  # fmt: skip
INSIDE = (b"Traceback", b"0x7f", b"/runtime/", b"icc.runtime")


def bodies(data: bytes) -> None:
    """Decode a body by the schema of every route, until one accepts it; raise the last refusal if none does."""
    refused: IccError | None = None
    for kind in KINDS:
        try:
            decoded(data, kind)
            return
        except HttpError as error:
            assert error.status == 400 and error.body().error.message, error
            if "\n" in error.message:
                raise
            refused = error
    assert refused is not None
    raise refused


class _Kept(asyncio.Transport):
    """A connection that keeps all written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = bytearray(), False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_protocol(self, protocol: Any) -> None: ...


async def _app(scope: Any, receive: Any, send: Any) -> None:
    """An application that reads a body as the server does."""
    if scope["type"] != "http":
        return
    try:
        decoded(await read_body(Request(scope, receive)), CompletionRequest)
        response: Any = PlainTextResponse("ok")
    except ClientGone:
        return
    except HttpError as error:
        response = error_response(scope, error)
    await response(scope, receive, send)


@functools.cache
def _config() -> uvicorn.Config:
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
    app = AccessLog(_app)
    return uvicorn.Config(
        app, http=HttpProtocol, lifespan="off", log_config=None, access_log=False, server_header=False
    )


async def _talk(data: bytes) -> bytes:
    wrong: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
    state, kept = ServerState(), _Kept()
    protocol = HttpProtocol(config=_config(), server_state=state, app_state={})
    protocol.connection_made(kept)
    half = len(data) // 2
    for part in (data[:half], data[half:]):  # in two parts, as a network may deliver them
        if part and not kept.closed:
            protocol.data_received(part)
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    for _ in range(3):
        await asyncio.sleep(0)
    left = [task for task in state.tasks if not task.done()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert not wrong, wrong[0]
    return bytes(kept.written)


def conversation(data: bytes) -> None:
    """Send these bytes over a connection and close it. The answer must not be a 5xx, nor show internals of the server.
    HttpError if the request is refused."""
    written = asyncio.run(_talk(data))
    assert not written or (written.startswith(b"HTTP/1.1 ") and written[9:10] in b"1234"), written[:200]
    assert not any(word in written for word in INSIDE), written[:300]
    if written[9:10] == b"4":
        raise HttpError(int(written[9:12]), written.partition(b"\r\n")[0].decode("latin-1"))
