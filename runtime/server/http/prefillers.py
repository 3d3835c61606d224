"""Prefillers: the header x-prefiller-host-port, by which routers of the Gateway API inference extension (llm-d) name
the server that computes a prompt before this one answers it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from fastapi import Request

from ...errors import UsageError
from ..api.errors import HttpError
from ..api.requests import ChatRequest, CompletionRequest, KVTransferParams
from ..engine.kv_file import KV_FOLDER, new_kv_name
from ..nixl.nixl import Nixl
from .kv_fetch import KVFetcher, asked
from .streams import while_connected

log = logging.getLogger("icc.serve")
HEADER = "x-prefiller-host-port"
_TIMEOUT_S = 600.0
_BEGIN_S = 30  # that a server may take to read a prompt
_MOST_BYTES = 1 << 20  # of an answer with one token
_Completion = CompletionRequest | ChatRequest
_ADDRESS = re.compile(r"[A-Za-z0-9._-]{1,253}:\d{1,5}|\[[0-9A-Fa-f:]{2,45}\]:\d{1,5}")


class Prefillers:
    """Servers that may be named. addresses: HOST:PORT each; none: the header changes nothing. folder: where engine
    processes look for KV. nixl: see KVFetcher."""

    def __init__(self, addresses: Sequence[str] = (), folder: Path = KV_FOLDER, nixl: Nixl | None = None) -> None:
        for address in addresses:
            if not _ADDRESS.fullmatch(address):
                raise UsageError(f"--prefiller {address!r} is no HOST:PORT", "give --prefiller 10.0.0.5:8000")
        self._addresses, self._folder = frozenset(addresses), folder
        self._fetcher = KVFetcher(folder, nixl)

    async def completion(self, request: Request, body: CompletionRequest) -> CompletionRequest:
        """The body, with where the KV of its prompt is, if another server was to compute that and has."""
        params = await self._computed(request, msgspec.structs.replace(body, **_ONE_TOKEN, best_of=None))
        return body if params is None else msgspec.structs.replace(body, kv_transfer_params=params)

    async def chat(self, request: Request, body: ChatRequest) -> ChatRequest:
        """As `completion`."""
        one = msgspec.structs.replace(body, **_ONE_TOKEN, max_completion_tokens=None)
        params = await self._computed(request, one)
        return body if params is None else msgspec.structs.replace(body, kv_transfer_params=params)

    async def _computed(self, request: Request, body: _Completion) -> KVTransferParams | None:
        """Have a prompt computed, and its KV brought here; None where it is to be computed here. HttpError 403 for a
        server that may not be named, ClientGone."""
        address = request.headers.get(HEADER, "").split(",")[0].strip()
        if not address or not self._addresses:
            return None
        if address not in self._addresses:
            raise HttpError(403, f"{HEADER}: {address[:80]!r} is none of this server's --prefiller", HEADER)
        found: list[KVTransferParams | None] = []

        async def work() -> None:
            found.append(await self._ask(address, request, body))

        await while_connected(request.receive, work())
        return found[0]

    async def _ask(self, address: str, request: Request, body: _Completion) -> KVTransferParams | None:
        """Ask a server to compute, and bring what it has of that while it does."""
        key, name = request.headers.get("authorization", ""), new_kv_name()
        asks = msgspec.structs.replace(body, kv_transfer_params=KVTransferParams(True, remote_engine_id=name))
        fetching = asyncio.create_task(self._fetcher.fetch(address, name, key, _BEGIN_S))
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                async with asked(address, "POST", request.url.path, key, msgspec.json.encode(asks)) as answer:
                    whole = msgspec.json.decode(await answer.whole(_MOST_BYTES), type=_PrefillAnswer)
                params = whole.kv_transfer_params
                if params is None or params.remote_engine_id != name:
                    return None  # nothing can be given of such a prompt
                await fetching
                return params
        except (OSError, ValueError, EOFError, msgspec.DecodeError) as error:
            log.warning("%s computes no prompt: %s", address, str(error) or type(error).__name__)
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        if (self._folder / name).exists():  # what has come of it: the rest is computed here
            return KVTransferParams(do_remote_prefill=True, remote_engine_id=name)
        return None


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: KVTransferParams | None = None


_ONE_TOKEN: dict[str, object] = {
    "max_tokens": 1,
    "n": 1,
    "stream": False,
    "stream_options": None,
}
