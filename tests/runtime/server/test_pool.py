"""Replicas of a pool that restart: their adapters, and the engine that they run."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from icc.runtime.requests.params import SamplingParams
from icc.runtime.server.api.adapters import ServedAdapters
from icc.runtime.server.api.run import Run
from icc.runtime.server.engine.engine_pool import EnginePool
from icc.runtime.server.engine.engine_stream import EngineFailed, EngineStream, SentPrompt
from icc.runtime.server.engine.messages import Delta, Submit

# An engine process. It gets ready once the file "wait" is gone, logs the adapters that it loads, and answers a prompt
# with its process id; if the adapter's name contains "hang" it does not answer.
ENGINE = """
import os, socket, sys, threading, time
import msgspec
from pathlib import Path
from icc.runtime.server.engine.frames import Frames
from icc.runtime.server.engine.messages import *
end, folder = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])
while (folder / "wait").exists():
    time.sleep(0.01)
if sys.argv[3] == "bad":
    end.sendall(encode(Fatal("no engine", "", 1)))
    sys.exit(1)
end.sendall(encode(Ready(100, 4, 0.0)))
frames, decoder = Frames(), msgspec.msgpack.Decoder(ToEngine)
def load(message):
    while (folder / "slow").exists():
        time.sleep(0.01)
    with open(folder / str(os.getpid()), "a") as log:
        log.write(message.name + " ")
    end.sendall(encode(AdapterDone(message.id)))
while data := end.recv(1 << 20):
    for body in frames.feed(data):
        message = decoder.decode(body)
        if isinstance(message, LoadAdapter):
            threading.Thread(target=load, args=(message,), daemon=True).start()
        elif isinstance(message, Submit) and "hang" not in message.adapter:
            delta = Delta(message.id, 0, text=str(os.getpid()), reason="stop")
            end.sendall(encode(Report([delta], Stats())))
"""


def pool(folder: Path, count: int) -> EnginePool:
    return EnginePool([command(folder, "good")] * count, watchdog_s=60)


def command(folder: Path, kind: str) -> list[str]:
    return [sys.executable, "-c", ENGINE, "{fd}", str(folder), kind]


async def until(check: object) -> None:
    while not check():  # type: ignore[operator]
        await asyncio.sleep(0.01)


async def answered_by(engines: EnginePool, adapter: str = "") -> int:
    """The id of the process that answers a prompt."""
    stream = engines.submit([Submit(0, (1, 2, 3), SamplingParams(), adapter=adapter)])
    [delta] = await stream.take()
    return int(delta.text)


def run(coroutine: object) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))  # type: ignore[arg-type]


def test_adapters_are_loaded_again_where_they_are_lost(tmp_path: Path) -> None:
    """Only the restarted replica loads them again. Until then it gets no prompts with adapters; others do not wait."""

    def loaded(pid: int | None) -> list[str]:
        path = tmp_path / str(pid)
        return path.read_text().split() if path.exists() else []

    async def go() -> None:
        engines = pool(tmp_path, 2)
        adapters = ServedAdapters(engines, ("base",), None, {"one": tmp_path, "two": tmp_path})
        await engines.start()
        await adapters.load_first()
        first, second = (replica.pid for replica in engines.replicas)
        assert loaded(first) == loaded(second) == ["one", "two"]
        (tmp_path / "slow").touch()
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: engines.replicas[0].pid not in (None, first) and len(engines.ready) == 2)
        again = engines.replicas[0].pid
        assert await adapters.scaled("base", "one") == ("one", 1.0)  # the other replica has it: no request waits
        assert {await answered_by(engines, "one") for _ in range(8)} == {second}
        assert await answered_by(engines) == again  # a prompt without an adapter goes to the first of two idle replicas
        (tmp_path / "slow").unlink()
        await until(lambda: engines.replicas[0].loaded == {"one", "two"})
        assert loaded(again) == ["one", "two"] and loaded(second) == ["one", "two"]
        assert await answered_by(engines, "one") == again
        await engines.stop()

    run(go())


def test_an_adapter_is_loaded_though_a_replica_dies_meanwhile(tmp_path: Path) -> None:
    """The other replicas have it, and the restarted one loads it, too."""

    async def go() -> None:
        engines = pool(tmp_path, 2)
        adapters = ServedAdapters(engines, ("base",), None, {})
        await engines.start()
        (tmp_path / "slow").touch()
        loading = asyncio.create_task(adapters.load("one", tmp_path))
        await asyncio.sleep(0.1)
        assert engines.replicas[0].pid is not None
        os.kill(engines.replicas[0].pid, signal.SIGKILL)
        await until(lambda: len(engines.ready) == 1)
        (tmp_path / "slow").unlink()
        await loading
        await until(lambda: all(replica.loaded == {"one"} for replica in engines.replicas))
        await engines.stop()

    run(go())


@pytest.mark.parametrize("count", [1, 2])
def test_no_replica_has_an_adapter_again(tmp_path: Path, count: int) -> None:
    """Prompts that were not answered yet, and new ones, get a 503, which clients retry; a replica that has not loaded
    the adapter yet would refuse it as unknown (400)."""

    async def go() -> None:
        engines = pool(tmp_path, count)
        adapters = ServedAdapters(engines, ("base",), None, {"hang": tmp_path})
        await engines.start()
        await adapters.load_first()
        (tmp_path / "slow").touch()
        stream = engines.submit([Submit(0, (1, 2, 3), SamplingParams(), adapter="hang")])
        [last] = [one for one in engines.replicas if _holds(one.open, stream)]
        for replica in sorted(engines.replicas, key=lambda one: one is last):
            pid = replica.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda replica=replica, pid=pid: replica.facts is not None and replica.pid != pid)
        with pytest.raises(EngineFailed, match="the engine died") as lost:
            await stream.take()
        with pytest.raises(EngineFailed, match="adapter 'hang' is not loaded now") as refused:
            engines.submit([Submit(0, (1, 2, 3), SamplingParams(), adapter="hang")])
        assert lost.value.status == refused.value.status == 503
        assert await answered_by(engines) in {one.pid for one in engines.replicas}
        (tmp_path / "slow").unlink()
        await until(lambda: all(one.loaded == {"hang"} for one in engines.replicas))
        await engines.stop()

    run(go())


def test_a_prompt_follows_the_one_whose_adapter_is_on_its_way(tmp_path: Path) -> None:
    async def go() -> None:
        engines = pool(tmp_path, 2)
        adapters = ServedAdapters(engines, ("base",), None, {"hang1": tmp_path, "hang2": tmp_path})
        await engines.start()
        await adapters.load_first()
        for adapter in ("hang1", "hang2", "hang1", "hang2"):
            engines.submit([Submit(0, (1, 2, 3), SamplingParams(), adapter=adapter)])
        sent = [[prompt.submit.adapter for prompt in replica.open] for replica in engines.replicas]
        assert sent == [["hang1"] * 2, ["hang2"] * 2]  # each adapter is used on one replica only
        await engines.stop()

    run(go())


def test_one_that_is_started_again_goes_back_with_the_others(tmp_path: Path) -> None:
    """A restarted replica is changed back with the others if the change fails, whether it was loading or not yet
    started when the change began; if the change succeeds, it has the new engine."""

    async def go() -> None:
        engines = pool(tmp_path, 3)
        good, other, bad = (command(tmp_path, kind) for kind in ("good", "other", "bad"))
        await engines.start()
        for commands, kept in (([other, other, bad], good), ([other, other, other], other)):
            [victim] = [replica for replica in engines.replicas if replica.number == 0]
            (tmp_path / "wait").touch()
            pid = victim.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda victim=victim, pid=pid: victim.pid not in (None, pid))  # loading, but not ready
            change = asyncio.create_task(engines.reload(1, commands))
            await asyncio.sleep(0.1)
            (tmp_path / "wait").unlink()
            found = await asyncio.gather(change, return_exceptions=True)
            assert ("no engine" in str(found[0])) == (kept is good), found
            await until(lambda: len(engines.ready) == 3)
            assert [replica.started_with for replica in engines.replicas] == [kept] * 3
        await engines.stop()

    run(go())


def test_a_change_waits_until_adapters_are_there_again(tmp_path: Path) -> None:
    """Replicas are changed one after another: there is always one with the adapters."""

    async def go() -> None:
        engines, other = pool(tmp_path, 2), command(tmp_path, "other")
        adapters = ServedAdapters(engines, ("base",), None, {"one": tmp_path})
        await engines.start()
        await adapters.load_first()
        first, second = engines.replicas
        (tmp_path / "slow").touch()
        change = asyncio.create_task(engines.reload(1, [other] * 2))
        await until(lambda: first.started_with == other and first.takes)
        await asyncio.sleep(0.2)
        assert second.started_with != other and await answered_by(engines, "one") == second.pid
        (tmp_path / "slow").unlink()
        await change
        assert [one.loaded for one in engines.replicas] == [{"one"}] * 2
        assert [one.started_with for one in engines.replicas] == [other] * 2
        await engines.stop()

    run(go())


def test_one_that_waits_to_be_started_takes_part_in_a_change(tmp_path: Path) -> None:
    async def go() -> None:
        engines = pool(tmp_path, 2)
        good, other, bad = (command(tmp_path, kind) for kind in ("good", "other", "bad"))
        await engines.start()
        for commands, kept in (([other, bad], good), ([other, other], other)):
            victim = engines.replicas[0]
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
            await until(lambda victim=victim: victim.pid is None)
            found = await asyncio.gather(engines.reload(1, commands), return_exceptions=True)
            assert ("no engine" in str(found[0])) == (kept is good), found
            await until(lambda: len(engines.ready) == 2)
            assert [replica.started_with for replica in engines.replicas] == [kept] * 2
        await engines.stop()

    run(go())


def test_deltas_of_a_prompt_that_began_again_are_left_out() -> None:
    """One completion had ended before the restart, and some deltas were taken already."""

    async def go() -> None:
        submits = [Submit(number, (1,), SamplingParams(n=2)) for number in (5, 6)]
        stream = EngineStream(submits, whole=True)
        found = Run(cast(Any, _Job(submits)), stream)
        taking = asyncio.create_task(found.all_deltas())
        for number in (5, 6):
            stream.push(Delta(number, 0, (7,), "stale", reason="stop"))
        await asyncio.sleep(0)
        stream.push(Delta(5, 1, (7,), "stale"))  # not taken yet
        stream.begin_again(submits[0])
        for number, index in ((6, 1), (5, 0), (5, 1)):
            await asyncio.sleep(0)
            stream.push(Delta(number, index, (8, 9), "new", reason="stop"))
        deltas = await taking
        assert sorted((delta.id, delta.index, delta.text) for delta in deltas) == [
            (5, 0, "new"), (5, 1, "new"), (6, 0, "stale"), (6, 1, "new"),
        ]  # fmt: skip
        assert found.output_tokens == 7 and found.reasons == ["stop"] * 4

    run(go())


class _Job:
    deadline = None

    def __init__(self, submits: list[Submit]) -> None:
        self.submits = submits


def test_what_was_streamed_does_not_begin_again(tmp_path: Path) -> None:
    async def go() -> None:
        engines = pool(tmp_path, 2)
        adapters = ServedAdapters(engines, ("base",), None, {"hang1": tmp_path, "hang2": tmp_path})
        await engines.start()
        await adapters.load_first()
        for whole, adapter in ((True, "hang1"), (False, "hang2")):
            stream = engines.submit([Submit(0, (1,), SamplingParams(), adapter=adapter)], whole)
            stream.push(Delta(stream.first_id, 0, (1,), "a"))
            [holder] = [one for one in engines.replicas if _holds(one.open, stream)]
            assert holder.pid is not None
            os.kill(holder.pid, signal.SIGKILL)
            await until(lambda holder=holder: holder.pid is None)
            others = [one for one in engines.replicas if one is not holder and _holds(one.open, stream)]
            if whole:
                assert len(others) == 1
            else:
                assert not others
                await stream.take()
                with pytest.raises(EngineFailed, match="the engine died"):
                    await stream.take()
            engines.close(stream)
            await until(lambda: all(len(one.loaded) == 2 for one in engines.replicas))
        await engines.stop()

    run(go())


def _holds(prompts: Any, stream: EngineStream) -> bool:
    return any(cast(SentPrompt, prompt).stream is stream for prompt in prompts)
