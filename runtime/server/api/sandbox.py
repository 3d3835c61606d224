"""Sandbox: renders chat templates and checks grammars in small processes that may be killed at any time."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from ...errors import BusyError, MissingExtraError, RequestError, install
from ...templates.source import TemplateSource
from ...templates.template_input import TemplateInput
from .sandbox_main import CheckGrammar, SandboxAnswer, Setup

SECONDS = 2.0  # limit of one request; a normal one takes a few milliseconds
_START_S = 60.0  # limit of a start, which takes a third of a second on a free core
_RENDERERS, _CHECKERS = 2, 3  # the most processes of each kind


class Sandbox:
    """Processes that render templates, and others that check grammars: a grammar can occupy one of these for seconds
    without delaying a conversation. A request that takes too long or kills its process is refused."""

    def __init__(self, template: TemplateSource) -> None:
        setup = Setup(template.text, template.special_tokens, template.named)
        self._renderers, self._checkers = _Processes(setup, _RENDERERS), _Processes(setup, _CHECKERS)
        self._warming: asyncio.Task[None] | None = None

    @property
    def template_error(self) -> str:
        """Why the template cannot be used, once `start` has tried; "" if it can."""
        return self._renderers.setup_error

    async def render(self, request: TemplateInput) -> str:
        """The prompt for a conversation. RequestError if the template refuses it."""
        if self.template_error:
            raise RequestError(self.template_error, field="messages")
        return await self._renderers.ask(request, "messages")

    async def lower(self, grammar: str, field: str = "response_format") -> str:
        """Lower a grammar, a text of `grammars.sources`. RequestError if it is not a grammar, or exceeds the limits."""
        return await self._checkers.ask(CheckGrammar(grammar), field)

    async def start(self) -> None:
        """Start a process of each kind; the one for grammars starts in the background."""
        await self._renderers.warm()
        self._warming = asyncio.create_task(self._checkers.warm())

    async def stop(self) -> None:
        """End all of its processes."""
        if self._warming is not None:
            self._warming.cancel()
        await self._renderers.stop()
        await self._checkers.stop()


class _Processes:
    """A pool of up to `most` processes with one setup, each with one request at a time; a process is started if all
    others are busy."""

    def __init__(self, setup: Setup, most: int) -> None:
        self._setup = setup
        self._places = asyncio.Semaphore(most)
        self._running: set[asyncio.subprocess.Process] = set()
        self._free: list[asyncio.subprocess.Process] = []  # the most recently used last
        self.setup_error = ""

    async def warm(self) -> None:
        """Start a process if none is free."""
        async with self._places:
            if not self._free:
                self._free.append(await self._open())

    async def stop(self) -> None:
        for process in list(self._running):
            await self._kill(process)
        self._free.clear()

    async def ask(self, request: TemplateInput | CheckGrammar, field: str) -> str:
        """The text of the answer. RequestError if the request is refused, takes too long, or ends its process."""
        async with self._places:
            process = self._free.pop() if self._free else await self._open()
            if process.returncode is not None:
                await self._kill(process)
                process = await self._open()
            try:
                async with asyncio.timeout(SECONDS):
                    answer = await _exchange(process, request)
            except TimeoutError:
                await self._kill(process)
                raise RequestError(f"takes more than {SECONDS:g} s", field=field) from None
            except (asyncio.IncompleteReadError, ConnectionError):
                await self._kill(process)
                raise RequestError("takes too much memory", field=field) from None
            except BaseException:
                await self._kill(process)  # or its answer would be read as that of the next request
                raise
            self._free.append(process)
        if answer.error:
            raise RequestError(answer.error[:500], field=field)
        return answer.text

    async def _open(self) -> asyncio.subprocess.Process:
        pipe, module = asyncio.subprocess.PIPE, f"{__package__}.sandbox_main"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", module, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
        self._running.add(process)
        try:
            async with asyncio.timeout(_START_S):
                self.setup_error = (await _exchange(process, self._setup)).error
        except TimeoutError:
            await self._kill(process)
            raise BusyError(
                f"the process that renders templates and checks grammars did not start within {_START_S:g} s",
                "this machine is too busy: try again later",
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._kill(process)
            raise MissingExtraError(
                "the process that renders templates and checks grammars ended when it started",
                f"a package of the server is damaged or too old: {install('serve')}",
            ) from None
        except BaseException:
            await self._kill(process)
            raise
        return process

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        self._running.discard(process)
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _exchange(process: asyncio.subprocess.Process, message: msgspec.Struct) -> SandboxAnswer:
    assert process.stdin is not None and process.stdout is not None
    body = msgspec.json.encode(message)  # not MessagePack, whose integers have at most 64 bits
    process.stdin.write(len(body).to_bytes(4, "little") + body)
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(4), "little")
    return msgspec.json.decode(await process.stdout.readexactly(size), type=SandboxAnswer)
