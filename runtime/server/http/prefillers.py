"""Prefillers: servers that compute prompts for this one, which decodes the answers. The header x-prefiller-host-port
names one for a request, as set by routers of the Gateway API inference extension (llm-d); a server of role decode also
chooses one itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from fastapi import Request

from ...errors import UsageError
from ..api import limits
from ..api.errors import HttpError
from ..api.jobs import Job
from ..api.requests import ChatRequest, CompletionRequest, KVTransferParams
from ..api.transfers import with_transfer
from ..engine.kv_exchange import shared
from ..engine.kv_file import KV_FOLDER, new_kv_name
from ..engine.router import ReplicaLoad, Router, prefix_keys
from ..nixl.nixl import Nixl
from .kv_fetch import KVFetcher, asked
from .streams import while_connected

log = logging.getLogger("icc.serve")
HEADER = "x-prefiller-host-port"
_TIMEOUT_S = 600.0
_BEGIN_S = 30  # how long a server may take to start a prompt
_MOST_BYTES = 1 << 20  # the largest answer with one token
_Completion = CompletionRequest | ChatRequest
_ADDRESS = re.compile(r"[A-Za-z0-9._-]{1,253}:\d{1,5}|\[[0-9A-Fa-f:]{2,45}\]:\d{1,5}")


class Prefillers:
    """The servers that a request may name. addresses: HOST:PORT each; without any, the header is ignored. folder: where
    engine processes read KV. nixl: see KVFetcher. longest: prompts with more uncached tokens than this are computed by
    one of the servers even if the request names none; None: only if it names one. capacity: of the KV cache here, in
    tokens."""

    def __init__(
        self,
        addresses: Sequence[str] = (),
        folder: Path = KV_FOLDER,
        nixl: Nixl | None = None,
        longest: int | None = None,
        capacity: int = 1 << 20,
    ) -> None:
        for address in addresses:
            if not _ADDRESS.fullmatch(address):
                raise UsageError(f"--prefiller {address!r} is no HOST:PORT", "give --prefiller 10.0.0.5:8000")
        self._addresses, self._folder = tuple(dict.fromkeys(addresses)), folder
        self._fetcher = KVFetcher(folder, nixl)
        self._longest, self._capacity = longest, capacity
        self._here, self._under_way = Router(), Counter[str]()
        self._avoided = dict[str, float]()  # by address: until when a server that did not answer is avoided

    async def completion(self, request: Request, body: CompletionRequest, job: Job) -> Job:
        """The job of a request, which takes its prompt's KV from another server if that was named or chosen and has
        computed it."""
        return await self._with_kv(request, msgspec.structs.replace(body, **_ONE_TOKEN, best_of=None), job)

    async def chat(self, request: Request, body: ChatRequest, job: Job) -> Job:
        """As `completion`."""
        return await self._with_kv(
            request, msgspec.structs.replace(body, **_ONE_TOKEN, max_completion_tokens=None), job
        )

    async def _with_kv(self, request: Request, body: _Completion, job: Job) -> Job:
        """Have the named or chosen server compute a prompt, and fetch its KV; without one, the job is unchanged.
        HttpError 403 for a server that may not be named, ClientGone if the client disconnects."""
        address = self._named(request) or self._chosen(job)
        if address is None or self._avoided.get(address, 0.0) > time.monotonic():
            return job
        found: list[KVTransferParams | None] = []

        async def work() -> None:
            found.append(await self._ask(address, request, body))

        self._under_way[address] += 1
        try:
            await while_connected(request.receive, work())
        finally:
            self._under_way[address] -= 1
        return job if found[0] is None else replace(job, submits=[with_transfer(one, found[0]) for one in job.submits])

    def _named(self, request: Request) -> str | None:
        """The server that the header names; None without the header, or if it is ignored. HttpError 403 for an unknown
        server."""
        address = request.headers.get(HEADER, "").split(",")[0].strip()
        if not address or not self._addresses:
            return None
        if address not in self._addresses:
            raise HttpError(403, f"{HEADER}: {address[:80]!r} is none of this server's --prefiller", HEADER)
        return address

    def _chosen(self, job: Job) -> str | None:
        """The server with the fewest running prompts, for a prompt with more than `longest` uncached tokens; None for
        others."""
        if self._longest is None or len(job.submits) != 1 or not shared(job.submits[0]):
            return None
        [submit] = job.submits
        keys, idle = prefix_keys(submit), ReplicaLoad(0, 0, 0, 1, 0.0, True)
        [(_, new)] = self._here.ranked(keys, len(submit.prompt), [idle])
        self._here.ran(0, keys, self._capacity)
        if new <= self._longest:
            return None
        now = time.monotonic()
        return min(self._addresses, key=lambda one: (self._avoided.get(one, 0.0) > now, self._under_way[one]))

    async def _ask(self, address: str, request: Request, body: _Completion) -> KVTransferParams | None:
        """Ask a server to compute a prompt, and fetch its KV meanwhile. None if no KV came."""
        name = new_kv_name()
        try:
            return await self._brought(address, name, request, body)
        except BaseException:  # the client is gone: the KV is not needed
            (self._folder / name).unlink(missing_ok=True)
            raise

    async def _brought(self, address: str, name: str, request: Request, body: _Completion) -> KVTransferParams | None:
        """As `_ask`, with the KV's name. A server that does not answer is avoided for a while."""
        key = request.headers.get("authorization", "")
        asks = msgspec.structs.replace(body, kv_transfer_params=KVTransferParams(True, remote_engine_id=name))
        fetching = asyncio.create_task(self._fetcher.fetch(address, name, key, _BEGIN_S))
        try:
            async with asyncio.timeout(_TIMEOUT_S), _there(address):
                async with asked(address, "POST", request.url.path, key, msgspec.json.encode(asks)) as answer:
                    whole = msgspec.json.decode(await answer.whole(_MOST_BYTES), type=_PrefillAnswer)
                params = whole.kv_transfer_params
                if params is None or params.remote_engine_id != name:
                    return None  # the KV of this prompt cannot be transferred
                await fetching
                return params
        except (OSError, ValueError, EOFError, msgspec.DecodeError) as error:
            log.warning("%s computes no prompt: %s", address, str(error) or type(error).__name__)
            if isinstance(error, OSError | EOFError):
                self._avoided[address] = time.monotonic() + limits.PEER_AVOID_S
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        if (self._folder / name).exists():  # a part has come: the rest is computed here
            return KVTransferParams(do_remote_prefill=True, remote_engine_id=name)
        return None


@contextlib.asynccontextmanager
async def _there(address: str) -> AsyncIterator[None]:
    """Context that raises TimeoutError once a server fails its regular health checks: a server that computes sends
    nothing for a long time, like one that hangs."""
    limit = asyncio.timeout(None)

    def give_up(done: asyncio.Task[None]) -> None:
        limit.reschedule(0.0)

    try:
        async with limit:
            watching = asyncio.create_task(_hangs(address))
            watching.add_done_callback(give_up)
            try:
                yield
            finally:
                watching.remove_done_callback(give_up)
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
    except TimeoutError:
        raise TimeoutError("its health check failed") from None


async def _hangs(address: str) -> None:
    """Wait until a health check of a server fails."""
    with contextlib.suppress(OSError, ValueError, EOFError):
        while True:
            await asyncio.sleep(limits.PEER_S)
            async with asyncio.timeout(limits.PEER_ANSWER_S), asked(address, "GET", "/live", "") as answer:
                await answer.whole(_MOST_BYTES)


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: KVTransferParams | None = None


_ONE_TOKEN: dict[str, object] = {
    "max_tokens": 1,
    "n": 1,
    "stream": False,
    "stream_options": None,
}
