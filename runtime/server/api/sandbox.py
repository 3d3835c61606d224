"""Sandbox: renders chat templates and checks grammars in a small process that may be killed at any time."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from ...errors import RequestError
from .sandbox_main import Answer, CheckGrammar, Render, Setup

SECONDS = 2.0  # for one request; a normal one takes a few milliseconds
_START_S = 20.0


class Sandbox:
    """One process, one request at a time; a request that takes too long or kills the process is refused."""

    def __init__(self, template: str, special_tokens: dict[str, str]) -> None:
        self._setup = Setup(template, special_tokens)
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self.restarts = -1
        self.template_error = ""

    async def render(self, request: Render) -> str:
        """The prompt for a conversation. RequestError if the template refuses it."""
        return await self._ask(request, "messages")

    async def lower(self, grammar: str, field: str = "response_format") -> str:
        """A text of `grammars.sources`, lowered. RequestError if it is no grammar, or one beyond the limits."""
        return await self._ask(CheckGrammar(grammar), field)

    async def start(self) -> None:
        """Start the process; `template_error` says why the template cannot be used, if so."""
        async with self._lock:
            await self._started()

    async def stop(self) -> None:
        async with self._lock:
            await self._kill()

    async def _ask(self, request: Render | CheckGrammar, field: str) -> str:
        async with self._lock:
            process = await self._started()
            if self.template_error and isinstance(request, Render):
                raise RequestError(self.template_error, field=field)
            try:
                async with asyncio.timeout(SECONDS):
                    answer = await _exchange(process, request)
            except TimeoutError:
                await self._kill()
                raise RequestError(f"takes more than {SECONDS:g} s", field=field) from None
            except (asyncio.IncompleteReadError, ConnectionError):
                await self._kill()
                raise RequestError("takes too much memory", field=field) from None
            except asyncio.CancelledError:
                await self._kill()  # its answer would be taken for that of the next request
                raise
        if answer.error:
            raise RequestError(answer.error[:500], field=field)
        return answer.text

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            module = f"{__package__}.sandbox_main"
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", module, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
            )
            self.restarts += 1
            async with asyncio.timeout(_START_S):
                self.template_error = (await _exchange(self._process, self._setup)).error
        return self._process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


async def _exchange(process: asyncio.subprocess.Process, message: msgspec.Struct) -> Answer:
    assert process.stdin is not None and process.stdout is not None
    body = msgspec.json.encode(message)  # MessagePack has no integers of more than 64 bits
    process.stdin.write(len(body).to_bytes(4, "little") + body)
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(4), "little")
    return msgspec.json.decode(await process.stdout.readexactly(size), type=Answer)
