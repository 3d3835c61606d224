"""Endpoint: one streamed request to an OpenAI server, and the times at which its parts arrived."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ..errors import UsageError

_MAX_LINE = 1 << 20
_ERROR_CHARS = 2000
_SAID = ("content", "reasoning_content", "reasoning", "tool_calls")  # the names that servers use for a model's text
_OPTIONAL = ("stream_options", "ignore_eos")  # fields that some servers do not know


@dataclass(slots=True)
class Trace:
    """The trace of one request. Times are seconds on the monotonic clock: when it was due, and when each chunk of text
    arrived.

    status: HTTP status, 0 if there was no answer. error: what went wrong, "" if nothing. silent: when events without
    text arrived, for example for special tokens or part of a character. ended: whether the stream said that it is
    complete.
    """

    due: float
    sent: float = 0.0
    status: int = 0
    error: str = ""
    pieces: list[float] = field(default_factory=list)
    silent: list[float] = field(default_factory=list)
    ended: bool = False
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ok(self) -> bool:
        """Whether there was an answer with text and without an error."""
        return self.status == 200 and not self.error and bool(self.pieces)


class Endpoint:
    """A server to measure. chat: use /v1/chat/completions. extra: fields that are added to every body.

    A URL that ends with a version, such as /v3 of OpenVINO's server, is used unchanged; to others /v1 is appended.
    """

    def __init__(
        self, url: str, model: str, *, chat: bool = False, key: str | None = None, extra: dict[str, Any] | None = None
    ) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no address like http://127.0.0.1:8000")
        self._host, self._tls = parts.hostname, ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        path = parts.path.rstrip("/")
        base = path if re.search(r"/v\d+$", path) else f"{path}/v1"
        self._path = f"{base}/{'chat/completions' if chat else 'completions'}"
        self._models = f"{base}/models"
        self.left_out: set[str] = set()  # fields that the server refused
        self.model, self._chat, self._key, self._extra = model, chat, key, extra or {}

    async def find_model(self) -> str:
        """The model to ask for: the first that the server lists, if none was named. UsageError if it lists none."""
        reader, writer = await self._open()
        try:
            await self._send(writer, "GET", self._models, b"")
            status, body = await _answer(reader)
            raw = b"".join([part async for part in body])
            if status != 200:
                raise UsageError(f"{self._models} answers {status}")
            return json.loads(raw)["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as error:
            raise UsageError(f"{self._models} lists no models", "name one with --model") from error
        finally:
            writer.close()

    async def ask(self, prompt: str, max_tokens: int, due: float) -> Trace:
        """Send a prompt now and trace its answer; the request was due at `due`, in seconds."""
        trace = Trace(due, sent=time.monotonic())
        asked = {"messages": [{"role": "user", "content": prompt}]} if self._chat else {"prompt": prompt}
        body = {"model": self.model, **asked, "max_tokens": max_tokens, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "temperature": 0, **self._extra}
        body = {name: value for name, value in body.items() if name not in self.left_out}
        try:
            reader, writer = await self._open()
            try:
                await self._send(writer, "POST", self._path, json.dumps(body).encode())
                trace.status, parts = await _answer(reader)
                if trace.status == 200:
                    await _read_events(parts, trace)
                else:
                    raw = b"".join([part async for part in parts])
                    trace.error = raw[:_ERROR_CHARS].decode(errors="replace") or f"status {trace.status}"
            finally:
                writer.close()
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            trace.error = trace.error or f"{type(error).__name__}: {error}"
        trace.end = time.monotonic()
        return trace

    def leave_out(self, trace: Trace) -> bool:
        """Whether the request failed because of fields that can be left out; if so, they are left out from now on."""
        refused = {name for name in _OPTIONAL if name in trace.error} - self.left_out
        if trace.status not in (400, 422) or not refused:
            return False
        self.left_out |= refused
        return True

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=_MAX_LINE)

    async def _send(self, writer: asyncio.StreamWriter, method: str, path: str, body: bytes) -> None:
        lines = [f"{method} {path} HTTP/1.1", f"host: {self._host}:{self._port}", "connection: close"]
        lines += ["content-type: application/json", f"content-length: {len(body)}", "accept: */*"]
        if self._key:
            lines.append(f"authorization: Bearer {self._key}")
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, AsyncIterator[bytes]]:
    """The HTTP status and the chunks of the body."""
    status_line = await reader.readline()
    if not status_line.startswith(b"HTTP/1."):
        raise ValueError("no HTTP answer")
    status = int(status_line.split()[1])
    headers: dict[bytes, bytes] = {}
    while (line := await reader.readline()) not in (b"\r\n", b"\n", b""):
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip().lower()
    if b"chunked" in headers.get(b"transfer-encoding", b""):
        return status, _chunks(reader)
    length = headers.get(b"content-length")
    return status, _plain(reader, None if length is None else int(length))


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _plain(reader: asyncio.StreamReader, length: int | None) -> AsyncIterator[bytes]:
    if length is not None:
        yield await reader.readexactly(length)
        return
    while part := await reader.read(65536):
        yield part


async def _read_events(parts: AsyncIterator[bytes], trace: Trace) -> None:
    """Record when each event with text arrived, and the usage. Comments, which only keep connections alive, are
    skipped."""
    held = b""
    async for part in parts:
        now = time.monotonic()
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            _read_line(line.strip(), now, trace)
    _read_line(held.strip(), time.monotonic(), trace)
    if not trace.pieces and trace.output_tokens:  # a token without text still counts as a token
        trace.pieces = trace.silent
    if not trace.ended and not trace.error:
        trace.error = "the stream ended before it was complete"


def _read_line(line: bytes, now: float, trace: Trace) -> None:
    name, _, data = line.partition(b":")
    data = data.strip()
    if name == b"error":  # as older llama.cpp sends
        trace.error = data[:_ERROR_CHARS].decode(errors="replace")
    elif name == b"data" and data == b"[DONE]":
        trace.ended = True
    elif name == b"data" and data:
        _note(json.loads(data), now, trace)
    elif line.startswith(b"{"):  # the server does not stream errors, or sent nothing
        trace.error = line[:_ERROR_CHARS].decode(errors="replace")


def _note(event: dict[str, Any], now: float, trace: Trace) -> None:
    if event.get("error"):
        trace.error = str(event["error"])[:_ERROR_CHARS]
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        said = choice.get("text"), *(delta.get(name) for name in _SAID)
        if any(said):
            trace.pieces.append(now)
        elif "role" not in delta:  # the event with the role comes before any token
            trace.silent.append(now)
        trace.ended |= bool(choice.get("finish_reason"))
    usage = event.get("usage")
    if usage:
        trace.prompt_tokens = usage.get("prompt_tokens", 0)
        trace.output_tokens = usage.get("completion_tokens", 0)
        trace.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
