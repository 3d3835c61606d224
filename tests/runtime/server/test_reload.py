"""Reloading the engine, while its process dies or is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from icc.runtime.format.adapters import AdapterPlan, AdapterRoom, AdapterSite
from icc.runtime.requests.params import SamplingParams
from icc.runtime.server.api import changes
from icc.runtime.server.api.adapters import ServedAdapters
from icc.runtime.server.api.changes import EngineChanges
from icc.runtime.server.api.errors import HttpError
from icc.runtime.server.engine.engine_client import EngineClient
from icc.runtime.server.engine.engine_pool import EnginePool
from icc.runtime.server.engine.engine_stream import EngineFailed, EngineStream, SentPrompt
from icc.runtime.server.engine.messages import Submit
from icc.runtime.server.http.serve import Server

ENGINE = """
import socket, sys, time
from icc.runtime.server.engine.messages import Ready, encode
end = socket.socket(fileno=int(sys.argv[1]))
end.sendall(encode(Ready(1, 1, 0.0)))
time.sleep(60)
"""


BAD = """
import socket, sys
from icc.runtime.server.engine.messages import Fatal, encode
socket.socket(fileno=int(sys.argv[1])).sendall(encode(Fatal("no engine", "", 1)))
"""


def test_an_engine_that_only_some_replicas_can_load() -> None:
    """All replicas return to the previous engine; if none is ready, nothing is changed."""
    good, other, bad = ([sys.executable, "-c", text, "{fd}"] for text in (ENGINE, ENGINE + "#", BAD))

    async def run() -> None:
        pool = EnginePool([good, good, good])
        with pytest.raises(EngineFailed, match="no engine is ready"):
            await pool.reload(1, [other] * 3)
        await pool.start()
        pids = [replica.pid for replica in pool.replicas]
        with pytest.raises(EngineFailed, match="no engine"):
            await pool.reload(1, [other, bad, other])
        assert [replica.command for replica in pool.replicas] == [good] * 3
        assert pool.replicas[2].pid == pids[2] and pool.replicas[0].facts is not None
        while len(pool.ready) < 3:
            await asyncio.sleep(0.01)
        assert len({replica.pid for replica in pool.replicas} - set(pids)) == 2
        await pool.reload(1, [other] * 3)
        assert [replica.command for replica in pool.replicas] == [other] * 3 and len(pool.ready) == 3
        await pool.stop()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_it_dies_before_it_is_replaced() -> None:
    """The reload fails. A later death is handled as usual: it is counted, and running requests get the error."""

    async def ready(client: EngineClient) -> None:
        while client.facts is None:
            await asyncio.sleep(0.01)

    async def kill(client: EngineClient) -> str:
        """Kill the process; the error that a request gets which was running."""
        stream = EngineStream([Submit(client.restarts, (1,), SamplingParams())])
        client.send(SentPrompt(stream, stream.submits[0]))
        reload = asyncio.create_task(client.reload(30)) if client.restarts == 0 else None
        await asyncio.sleep(0.1)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        if reload is not None:
            with pytest.raises(EngineFailed, match="the engine died"):
                await reload
        with pytest.raises(EngineFailed) as caught:
            await stream.take()
        return str(caught.value)

    async def run() -> None:
        client = EngineClient([sys.executable, "-c", ENGINE, "{fd}"])
        await client.start()
        for deaths in (1, 2):
            assert await kill(client) == "the engine died"
            while client.restarts < deaths:
                await asyncio.sleep(0.01)
            await ready(client)
        await client.stop()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_another_engine_in_its_place_is_not_served(tmp_path: Path) -> None:
    """A process that restarts with another engine at its path is ended, because the HTTP process has another tokenizer;
    once the first engine is back it is served."""
    identity = tmp_path / "identity"
    text = ENGINE.replace("Ready(1, 1, 0.0)", f"Ready(1, 1, 0.0, identity=open({str(identity)!r}).read())")

    async def restarted(client: EngineClient, what: str) -> None:
        identity.write_text(what)
        before = client.restarts
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        while client.restarts < before + 2 and (client.facts is None or client.restarts == before):
            await asyncio.sleep(0.01)

    async def run() -> None:
        identity.write_text("one")
        client = EngineClient([sys.executable, "-c", text, "{fd}"])
        await client.start()
        await restarted(client, "another")
        assert client.facts is None
        identity.write_text("one")
        while client.facts is None:
            await asyncio.sleep(0.01)
        identity.write_text("another")
        with pytest.raises(EngineFailed, match="another model, tokenizer or limits"):
            await client.reload(1)
        await client.stop()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_one_change_at_a_time(monkeypatch: pytest.MonkeyPatch, toy_manifest: Callable[..., Any]) -> None:
    """A second change is refused while the first verifies and loads, and accepted afterwards."""
    manifest, begun, go = toy_manifest(), asyncio.Event(), asyncio.Event()

    class Pool:
        async def reload(self, wait_s: float, commands: Sequence[Sequence[str]]) -> None:
            begun.set()
            await go.wait()

    pool: Any = Pool()
    monkeypatch.setattr(changes, "_verified", lambda path, signed_by: (manifest, None))
    found = EngineChanges(
        pool, ServedAdapters(pool, ("m",), None, {}), Path("m.engine"), manifest, True, lambda path: []
    )

    async def run() -> None:
        first = asyncio.create_task(found.read_again(1))
        await asyncio.sleep(0)
        for second in (found.refit(1), found.change("x", 1), found.read_again(1)):
            with pytest.raises(HttpError, match="is being changed already") as refused:
                await second
            assert refused.value.status == 409
        await begun.wait()
        go.set()
        await first
        await found.read_again(1)

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    ("room", "lacking"),
    [
        (AdapterRoom(16, ("q", "v", "q+dora")), ""),
        (AdapterRoom(32, ("k", "q", "v", "q+dora", "v+dora")), ""),
        (AdapterRoom(8, ("q", "v", "q+dora")), "adapters of rank 16"),
        (AdapterRoom(16, ("q", "q+dora")), "adapters of v"),
        (AdapterRoom(16, ("q", "v")), r"adapters of q\+dora"),
        (None, "the adapters that are loaded"),
    ],
)
def test_less_room_for_adapters_than_some_may_need(
    room: AdapterRoom | None, lacking: str, monkeypatch: pytest.MonkeyPatch, toy_manifest: Callable[..., Any]
) -> None:
    """An engine that lacks slots for loaded adapters is refused, as they would be lost one by one when it loads them.
    If none is loaded, it is accepted."""
    manifest, reloads = toy_manifest(), list[float]()

    class Pool:
        sites = (AdapterSite("q", 1, 1, "a", "b", gain="g"), AdapterSite("v", 1, 1, "a", "b"))
        room = AdapterPlan(2, 16, [], list(sites)).room

        async def reload(self, wait_s: float, commands: Sequence[Sequence[str]]) -> None:
            reloads.append(wait_s)

        async def ask(self, question: object) -> None:
            pass

    pool: Any = Pool()
    monkeypatch.setattr(changes, "_verified", lambda path, signed_by: (manifest, room))
    adapters = ServedAdapters(pool, ("m",), None, {})
    found = EngineChanges(pool, adapters, Path("m.engine"), manifest, True, lambda path: [])

    async def run() -> None:
        await found.read_again(1)
        await adapters.load("one", Path("one"))
        if not lacking:
            return await found.read_again(1)
        with pytest.raises(HttpError, match=f"has no room for {lacking}") as refused:
            await found.read_again(1)
        assert refused.value.status == 409

    asyncio.run(run())
    assert len(reloads) == (1 if lacking else 2)


def test_a_second_sighup_is_not_dropped_silently(caplog: pytest.LogCaptureFixture) -> None:
    """The reload for the first signal is still running, and may not see the present content of the directory."""
    server = Server.__new__(Server)
    server._rereading = SimpleNamespace(done=lambda: False)  # type: ignore[assignment]
    with caplog.at_level("ERROR", "icc.serve"):
        server._hung_up()
    assert "send it again" in caplog.text
