"""The engine process's loop, over a socket pair and a fake device."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from icc.runtime.errors import DeviceError
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeExecutor
from icc.runtime.requests.params import SamplingParams
from icc.runtime.server.engine import kv_transfer
from icc.runtime.server.engine import worker as worker_module
from icc.runtime.server.engine.channel import Channel, ChannelClosed
from icc.runtime.server.engine.frames import Frames, SocketFrames
from icc.runtime.server.engine.kv_file import new_kv_name
from icc.runtime.server.engine.messages import (
    Cancel,
    DropKV,
    Failed,
    FromEngine,
    PromptLogprobs,
    Report,
    Submit,
    TakeKV,
    encode,
)
from icc.runtime.server.engine.prompts import PromptStage
from icc.runtime.server.engine.worker import Worker


class Peer:
    """The HTTP process's end of the socket, and the worker, one turn at a time."""

    def __init__(self, manifest: Any, executor: FakeExecutor) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self.llm = LLM(manifest, executor)
        self.worker = Worker(self.llm, Channel(theirs))
        self._frames, self._decoder = Frames(), msgspec.msgpack.Decoder(FromEngine)

    def send(self, *messages: Submit | Cancel | TakeKV | DropKV) -> None:
        self.socket.sendall(b"".join(map(encode, messages)))

    def turn(self) -> list[Any]:
        self.worker._turn()
        return self.received()

    def received(self) -> list[Any]:
        self.socket.setblocking(False)
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return []
        finally:
            self.socket.setblocking(True)
        return [self._decoder.decode(body) for body in self._frames.feed(data)]

    def until_idle(self) -> list[Any]:
        messages = self.turn()
        while self.llm.loop.has_work() or self.worker.prompts.count(PromptStage.ARRIVED):
            messages += self.turn()
        return messages


@pytest.fixture
def peer(toy_manifest: Callable[..., Any]) -> Callable[..., Peer]:
    return lambda **options: Peer(toy_manifest(vocab_size=64, max_seq_len=64), FakeExecutor(vocab_size=64, **options))


def nothing_left(worker: Worker) -> bool:
    prompts, driver = worker.prompts, worker._driver
    return not any([*prompts._stages.values(), prompts._deadlines, driver._generating, driver._reading])


def submit(submit_id: int, prompt: tuple[int, ...] = (1,), **params: Any) -> Submit:
    return Submit(submit_id, prompt, SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **params}))


def test_each_step_is_one_message_for_all(peer: Callable[..., Peer]) -> None:
    side = peer()
    side.send(*[submit(number, (number,)) for number in range(5)])
    messages = side.until_idle()
    assert all(isinstance(message, Report) for message in messages) and len(messages) == 4
    assert [len(message.deltas) for message in messages] == [5] * 4
    tokens = {n: [t for m in messages for d in m.deltas if d.id == n for t in d.token_ids] for n in range(5)}
    assert tokens == {n: [n + 1, n + 2, n + 3, n + 4] for n in range(5)}
    assert messages[-1].stats.output_tokens == 20 and messages[-1].stats.blocks_used == 0


def test_a_burst_is_taken_up_in_parts_so_that_it_delays_no_step(peer: Callable[..., Peer]) -> None:
    side = peer()
    side.send(*[submit(number, max_tokens=2) for number in range(1000)])
    known = []
    while len(known) < 30:
        side.turn()
        known.append(len(side.llm.loop.requests.live))
    growth = [after - before for before, after in itertools.pairwise(known)]
    assert max(growth) <= worker_module._INTAKE and side.worker.prompts.count(PromptStage.ARRIVED) > 300
    side.until_idle()
    assert side.worker._output_tokens == 2000


def test_cancel_reaches_what_waits_and_what_runs(peer: Callable[..., Peer]) -> None:
    side = peer()
    side.send(submit(1, n=3, max_tokens=50), submit(2, max_tokens=50))
    side.turn()
    assert side.llm.loop.scheduler.num_running + side.llm.loop.scheduler.num_waiting == 4
    side.send(Cancel(1))
    side.turn()
    assert side.llm.loop.scheduler.num_running == 1
    side.send(Cancel(2), submit(3), Cancel(3), Cancel(99))
    side.turn()
    assert not side.llm.loop.has_work() and side.llm.loop.scheduler.kv.is_idle
    assert nothing_left(side.worker)


def test_what_is_wrong_with_a_prompt_is_said(peer: Callable[..., Peer]) -> None:
    side = peer()
    side.send(submit(1, (99,)), submit(2, ()), msgspec.structs.replace(submit(3), grammar="start: /a/"), submit(4))
    failed = {message.id: message for message in side.until_idle() if isinstance(message, Failed)}
    assert set(failed) == {1, 2, 3} and all(message.status == 400 for message in failed.values())


def test_prompt_logprobs_come_before_the_answer(peer: Callable[..., Peer]) -> None:
    side = peer()
    side.send(msgspec.structs.replace(submit(1, (5, 6, 9)), prompt_logprobs=1), submit(2))
    messages = side.until_idle()
    [scores] = [message for message in messages if isinstance(message, PromptLogprobs)]
    assert [entry.token_id for entry in scores.logprobs] == [6, 9]
    assert [entry.top[0][0] for entry in scores.logprobs] == [6, 7]  # the model counts
    assert scores.logprobs[0].logprob > scores.logprobs[1].logprob
    first = next(i for i, m in enumerate(messages) if isinstance(m, Report) and any(d.id == 1 for d in m.deltas))
    assert messages.index(scores) < first
    side.send(msgspec.structs.replace(submit(3, (5, 6, 9)), prompt_logprobs=1))
    side.turn()
    side.send(Cancel(3))
    side.until_idle()
    assert nothing_left(side.worker) and not side.llm.loop.has_work()


def test_a_deadline_holds_in_the_engine(peer: Callable[..., Peer]) -> None:
    """Independent of the HTTP process: for requests that run, that wait, and that are scored."""
    side = peer(max_batch_size=2)
    late = [msgspec.structs.replace(submit(number, n=2, max_tokens=40), deadline=0.0) for number in (1, 2)]
    late.append(msgspec.structs.replace(submit(3, (5, 6, 9)), prompt_logprobs=1, deadline=0.0))
    in_time = msgspec.structs.replace(submit(4), deadline=60.0)
    side.send(*late, in_time)
    messages = side.until_idle()
    ended = [(d.id, d.index, d.reason) for m in messages if isinstance(m, Report) for d in m.deltas if d.reason]
    places = [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    assert ended == [*((*place, "deadline") for place in places), (4, 0, "length")]
    step = side.llm.executor.step

    def slow(batch: Any) -> Any:
        time.sleep(0.02)
        return step(batch)

    side.llm.executor.step = slow  # type: ignore[method-assign]
    side.send(msgspec.structs.replace(submit(5, n=2, max_tokens=40), deadline=0.05))
    messages = side.turn()
    while not any(d.reason for m in messages for d in m.deltas):
        messages += side.turn()
    assert [(d.id, d.index, d.reason) for d in messages[-1].deltas if d.reason] == [
        (5, 0, "deadline"),
        (5, 1, "deadline"),
    ]
    assert not side.llm.loop.has_work() and side.llm.loop.scheduler.kv.is_idle
    assert nothing_left(side.worker)


def test_wrong_books_are_made_anew_and_counted(peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_CHECK_S", 0.0)
    monkeypatch.setattr(worker_module, "HEARTBEAT_S", 0.0)
    side = peer()
    side.send(submit(1))
    side.until_idle()
    assert side.turn()[-1].stats.healed == 0
    side.llm.loop.scheduler.kv.groups[0].pool.allocate(3)  # lost blocks
    assert side.turn()[-1].stats.healed == 1
    assert side.turn()[-1].stats == msgspec.structs.replace(side.turn()[-1].stats, healed=1, blocks_used=0)
    side.send(submit(2))
    assert [d.token_ids for m in side.until_idle() for d in m.deltas] == [(2,), (3,), (4,), (5,)]


def test_a_peer_that_goes_ends_the_worker(peer: Callable[..., Peer]) -> None:
    side = peer()
    side.send(submit(1, max_tokens=50))
    side.turn()
    side.socket.close()
    with pytest.raises(ChannelClosed):
        while True:
            side.worker._turn()


def test_a_lost_rank_ends_the_engine_process(peer: Callable[..., Peer]) -> None:
    """Also if it is idle. A request that fails because of it is not reported as failed: the server runs it again
    elsewhere."""
    side = peer()
    side.worker._ranks = group = SimpleNamespace(lost="", halted=False, pids=[])
    side.worker._driver.adapters = SimpleNamespace(place=fails, salt_of=lambda *given: (b"", 0), wait=time.sleep)
    side.send(msgspec.structs.replace(submit(1), adapter="a"))
    [failed] = [message for message in side.turn() if isinstance(message, Failed)]
    assert failed.status == 500  # the adapter cannot be written, but all ranks are alive
    group.lost = "rank 1 has ended with -9"
    with pytest.raises(SystemExit):
        side.turn()
    group.lost, side.worker._driver.adapters.place = "", lambda *given: fails(group)
    side.send(msgspec.structs.replace(submit(2), adapter="a"))
    with pytest.raises(SystemExit):
        side.turn()
    assert not side.received()


def test_a_fault_that_says_all_is_logged_in_a_line(peer: Callable[..., Peer], caplog: pytest.LogCaptureFixture) -> None:
    """For instance a draft engine has lost a rank; answers continue without it."""
    told = peer().worker._driver.loop.on_fault
    told(DeviceError("rank 1 has ended with -9", ""))
    told(KeyError("a gap"))
    known, unknown = caplog.records
    assert known.getMessage() == "a step failed: rank 1 has ended with -9" and known.exc_info is None
    assert unknown.exc_info is not None


def test_an_engine_of_a_stopped_rank_does_not_say_that_it_lives(
    peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No heartbeat is sent, whether it is idle or a request waits for its adapter, so that the server ends it. Tokens
    that are ready are still sent."""
    monkeypatch.setattr(worker_module, "HEARTBEAT_S", 0.0)
    side = peer()
    side.worker._ranks = group = SimpleNamespace(lost="", halted=True, pids=[])
    assert not side.turn()
    side.send(submit(1))
    assert [delta.token_ids for message in side.until_idle() for delta in message.deltas] == [(2,), (3,), (4,), (5,)]
    driver = side.worker._driver
    side.worker._driver = SimpleNamespace(has_work=lambda: True, step=lambda: None, loop=driver.loop)
    assert not side.turn()
    side.worker._driver, group.halted = driver, False
    assert len(side.turn()) == 1


def fails(group: Any = None, *given: Any) -> None:
    """Fail as a call to a lost rank does. group: from now on its rank is lost."""
    if isinstance(group, SimpleNamespace):
        group.lost = "rank 1 has ended with -9"
    raise DeviceError("rank 1 has ended with -9: its part of the model is gone")


def test_frames_come_whole_however_they_are_cut() -> None:
    data = b"".join(encode(submit(number, tuple(range(number % 50)))) for number in range(100))
    for size in (1, 3, 7, 1000, len(data)):
        frames, bodies = Frames(), []
        for at in range(0, len(data), size):
            bodies += frames.feed(data[at : at + size])
        assert len(bodies) == 100
    with pytest.raises(ValueError, match="a frame of"):
        Frames().feed(b"\xff\xff\xff\xff")


def test_reading_a_message_takes_no_more_memory_than_it_has() -> None:
    """A buffer for the largest possible message, allocated for every message, would make the process grow without
    end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames, sent = SocketFrames(theirs), submit(1, (5,) * 100)
        tracemalloc.start()
        try:
            for _ in range(3):
                ours.sendall(encode(sent))
                [body] = frames.read()
                assert msgspec.msgpack.decode(body, type=Submit) == sent
            assert tracemalloc.get_traced_memory()[1] < 1 << 16
        finally:
            tracemalloc.stop()
        ours.close()
        with pytest.raises(EOFError):
            frames.read()


def test_kv_that_nobody_takes_is_removed(
    toy_manifest: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of a prompt that is cancelled before it begins; and old files, while others run."""
    monkeypatch.setattr(kv_transfer, "KV_FOLDER", tmp_path)
    peer, params = Peer(toy_manifest(), FakeExecutor()), SamplingParams(max_tokens=50, temperature=0)
    names = [new_kv_name() for _ in range(2)]
    for name in names:
        (tmp_path / name).write_bytes(bytes(9))
    peer.send(Submit(1, (5, 6), params), Submit(2, (5, 6), params, takes_kv=names[0]), Cancel(2))
    peer.turn()
    assert [path.name for path in tmp_path.iterdir()] == [names[1]]
    os.utime(tmp_path / names[1], (1.0, 1.0))
    monkeypatch.setattr(worker_module, "_CHECK_S", 0.0)
    peer.turn()
    assert peer.llm.loop.has_work() and not list(tmp_path.iterdir())


def test_kv_of_a_prompt_that_was_given_up_is_let_go(
    toy_manifest: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer, "KV_FOLDER", tmp_path)
    peer, name = Peer(toy_manifest(), FakeExecutor()), new_kv_name()
    (tmp_path / name).write_bytes(bytes(9))
    peer.send(TakeKV(name, b""))
    peer.turn()
    assert os.path.exists(f"/proc/self/fd/{_descriptor(tmp_path / name)}")
    peer.send(DropKV(name))
    peer.turn()
    assert not list(tmp_path.iterdir()) and _descriptor(tmp_path / f"{name} (deleted)") is None


def _descriptor(path: Path) -> str | None:
    """The number of this process's file descriptor for the path; None if there is none."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}") == str(path):
                return number
    return None
