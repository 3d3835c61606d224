"""KV goes from one host to another while its prompt is computed: over HTTP, and by NIXL."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from icc.runtime.errors import IccError, MissingExtraError
from icc.runtime.server.engine.kv_file import KVReader, new_kv_name
from icc.runtime.server.engine.kv_gifts import KVGifts
from icc.runtime.server.http.kv_fetch import asked
from icc.runtime.server.http.prefillers import HEADER
from icc.runtime.server.nixl import library
from icc.runtime.server.nixl.messages import Failure, FetchBytes, Fetched, Publish, Published
from icc.runtime.server.nixl.mover import HEAD, Mover
from icc.runtime.server.nixl.nixl import Nixl, NixlError

from .conftest import HERE, Served, running
from .fake_nixl import FakeAgent

LONG = "".join(chr(97 + number % 8) for number in range(400))  # 400 tokens; a step takes 64
FAKE = [sys.executable, str(HERE / "fake_nixl.py"), "{fd}"]
NAME = "icc-kv-" + "0" * 32
PEERS = {"PEER_S": 0.2, "PEER_ANSWER_S": 3.0, "PEER_AVOID_S": 5.0}  # limits.py

# -- what is there of a prompt that runs ---------------------------------------------------------------------------


def test_pieces_come_until_the_prompt_ends(tmp_path: Path) -> None:
    async def follow() -> None:
        gifts = KVGifts(tmp_path)
        assert not await gifts.wait(NAME, 0.01)
        waiting = asyncio.create_task(gifts.wait(NAME, 30))
        await asyncio.sleep(0)
        gifts.begin(NAME)
        assert await waiting
        pieces = gifts.pieces(NAME)
        first = asyncio.create_task(anext(pieces))
        await asyncio.sleep(0)
        gifts.grow(NAME, 10)
        assert await first == (0, 10)
        gifts.grow(NAME, 15)
        gifts.grow(NAME, 40)
        assert await anext(pieces) == (10, 40)
        last = asyncio.create_task(anext(pieces, None))
        await asyncio.sleep(0)
        gifts.end(NAME)
        assert await last is None
        assert not await gifts.wait(NAME, 0)
        (tmp_path / NAME).write_bytes(bytes(7))
        assert await gifts.wait(NAME, 0) and [piece async for piece in gifts.pieces(NAME)] == [(0, 7)]
        gifts.remove(NAME)
        assert not list(tmp_path.iterdir())
        (tmp_path / "else").write_bytes(bytes(7))
        (tmp_path / NAME).symlink_to(tmp_path / "else")
        gifts.remove("../else")
        assert not await gifts.wait(NAME, 0) and (tmp_path / "else").exists()

    asyncio.run(asyncio.wait_for(follow(), 30))


# -- NIXL ------------------------------------------------------------------------------------------------------------


class Pair:
    """A mover that publishes files of a folder, and another that fetches them."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.agents = FakeAgent("giver"), FakeAgent("taker")
        self.giver, self.taker = (Mover(agent, lambda: self.now) for agent in self.agents)
        self.source, self.target = folder / NAME, folder / "target"
        self.content = os.urandom(20_000)
        self.source.write_bytes(self.content)

    def publish(self, begin: int, end: int) -> Published:
        found = self.giver.publish(Publish(1, "key", str(self.source), begin, end))
        assert isinstance(found, Published), found
        return found

    def fetch(self, piece: Published, begin: int, end: int, shift: int = 0) -> Failure | None:
        return self.taker.fetch(FetchBytes(7, "key", piece.agent, piece.address + shift, str(self.target), begin, end))


def test_pieces_arrive_byte_by_byte(tmp_path: Path) -> None:
    pair, cuts = Pair(tmp_path), (0, 5, 5000, 20_000)
    for begin, end in pairwise(cuts):
        assert pair.fetch(pair.publish(begin, end), begin, end) is None and pair.taker.busy
        assert pair.taker.finished() == [Fetched(7)] and not pair.taker.busy
        assert pair.target.read_bytes() == pair.content[:end]
    assert pair.target.stat().st_mode & 0o777 == 0o600 and pair.agents[1].released == 3
    assert len(pair.agents[0].registered) == 3 and not pair.agents[1].registered
    pair.giver.forget("key")
    pair.taker.forget("key")
    assert not pair.agents[0].registered and not pair.agents[1].known


def test_only_what_was_published_can_be_read(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    piece = pair.publish(5000, 6000)
    for shift in (-1, 1, -5000):
        assert pair.fetch(piece, 0, 1000, shift) is None
        [failure] = pair.taker.finished()
        assert isinstance(failure, Failure)
    for path in (tmp_path / "target", tmp_path / "link", tmp_path / "none", Path("/etc/hostname")):
        refused = pair.giver.publish(Publish(2, "key", str(path), 0, 8))
        assert isinstance(refused, Failure), path
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / NAME).symlink_to(pair.source)
    assert isinstance(pair.giver.publish(Publish(2, "key", str(tmp_path / "away" / NAME), 0, 8)), Failure)
    assert len(pair.agents[0].registered) == 1


@pytest.mark.parametrize("state", ["ERR", "PROC"])
def test_what_does_not_arrive_is_not_taken_for_whole(state: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    piece = pair.publish(0, 20_000)
    pair.agents[1].state = state
    assert pair.fetch(piece, 0, 20_000) is None
    if state == "PROC":
        assert not pair.taker.finished()
        pair.now = 1000.0
    [failure] = pair.taker.finished()
    assert isinstance(failure, Failure) and not pair.taker.busy and not pair.agents[1].registered
    assert pair.target.read_bytes()[:HEAD] == bytes(HEAD)  # the first bytes are written last
    pair.agents[1].state = "DONE"
    assert pair.fetch(piece, 0, 20_000) is None and pair.taker.finished() == [Fetched(7)]
    assert pair.target.read_bytes() == pair.content


def test_a_process_of_its_own_moves_them_and_comes_back(tmp_path: Path) -> None:
    content, source = os.urandom(9000), tmp_path / NAME
    source.write_bytes(content)

    async def move(nixl: Nixl) -> None:
        agent, address = await nixl.publish("a", source, 0, 9000)
        (tmp_path / "target").unlink(missing_ok=True)
        await nixl.fetch("b", agent, address, tmp_path / "target", 0, 9000)
        assert (tmp_path / "target").read_bytes() == content
        nixl.forget("a")
        nixl.forget("b")

    async def check() -> None:
        nixl = Nixl(FAKE)
        await nixl.start()
        await move(nixl)
        with pytest.raises(NixlError, match="FileNotFoundError"):
            await nixl.publish("a", tmp_path / new_kv_name(), 0, 9)
        assert nixl._process is not None
        os.kill(nixl._process.pid, signal.SIGKILL)
        with pytest.raises(NixlError, match="has ended"):
            for _ in range(1000):
                await nixl.publish("a", source, 0, 9)
                await asyncio.sleep(0.01)
        await move(nixl)  # by a new process
        await nixl.stop()
        broken = Nixl([sys.executable, "-c", "pass", "{fd}"])
        with pytest.raises(IccError, match="--nixl: its process has ended"):
            await broken.start()
        await broken.stop()

    asyncio.run(asyncio.wait_for(check(), 60))


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="NIXL is not installed") as caught:
        Nixl()
    assert "icc-llm[nixl]" in caught.value.hint and "--no-deps nixl-cu12" in caught.value.hint


def test_nixl_itself_moves_them(tmp_path: Path) -> None:
    """Two processes over UCX: with its choice of TCP and shared memory, and with TCP alone."""
    if not any(map(library.importlib.util.find_spec, ("nixl_cu12", "nixl_cu13"))):
        pytest.skip("NIXL is not installed (69 MB)")
    content, source = os.urandom(3 << 20), tmp_path / NAME
    source.write_bytes(content)

    async def check() -> None:
        giver, taker = Nixl(), Nixl()
        await giver.start()
        await taker.start()
        for number in range(3):
            key, target, cuts = str(number), tmp_path / f"target{number}", (0, 100, 4096, 2 << 20, 3 << 20)
            for begin, end in pairwise(cuts):
                agent, address = await giver.publish(key, source, begin, end)
                await taker.fetch(key, agent, address, target, begin, end)
            assert target.read_bytes() == content
            giver.forget(key)
            taker.forget(key)
        agent, address = await giver.publish("last", source, 0, 4096)
        await giver.stop()
        with pytest.raises(NixlError):
            await taker.fetch("last", agent, address, tmp_path / "none", 0, 4096)
        await taker.stop()

    asyncio.run(asyncio.wait_for(check(), 120))


# -- servers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hosts:
    """Servers as if on separate hosts, each with its own folder for KV: two that compute slowly, the first of them with
    NIXL, and a third one with NIXL whose requests may name the first two."""

    folders: list[Path]
    servers: list[Served]

    def ask(self, giver: int, prompt: str) -> Any:
        """The last server's answer to a prompt that server number `giver` is to compute."""
        body = {"model": "toy", "prompt": prompt, "max_tokens": 8}
        header = {HEADER: f"127.0.0.1:{self.servers[giver].port}"}
        reply = self.servers[2].ask("POST", "/v1/completions", body, header)
        assert reply.status == 200, reply.raw
        return reply.json

    def asking(self, giver: int, prompt: str) -> tuple[threading.Thread, list[Any]]:
        """Start `ask` in a thread, and return it with the list for its answer as soon as some KV has arrived."""
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(self.ask(giver, prompt)))
        thread.start()
        end = time.monotonic() + 60
        while not any(self._sizes("*.part")):
            assert time.monotonic() < end and thread.is_alive(), answers
            time.sleep(0.005)
        return thread, answers

    def _sizes(self, names: str) -> Iterator[int]:
        for path in self.folders[2].glob(names):
            with contextlib.suppress(FileNotFoundError):
                yield path.stat().st_size

    def log(self, number: int) -> str:
        return self.servers[number].log.read_text()

    def check_nothing_is_left(self) -> None:
        for server, folder in zip(self.servers, self.folders, strict=True):
            if server.process.poll() is None:
                server.wait_until(server.idle)
                server.wait_until(lambda folder=folder: not list(folder.iterdir()))


@pytest.fixture(scope="module")
def hosts(chat_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    root, found = tmp_path_factory.mktemp("hosts"), Hosts([], [])
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as environment:
        if "ICC_REAL_NIXL" not in os.environ:  # with it, the real NIXL moves the bytes
            environment.setenv("ICC_FAKE_NIXL", "1")
        for number, (fault, nixl) in enumerate((("slow", True), ("slow", False), ("none", True))):
            found.folders.append(root / str(number))
            found.folders[-1].mkdir()
            environment.setenv("ICC_KV_FOLDER", str(found.folders[-1]))
            others = [f"127.0.0.1:{server.port}" for server in found.servers] if fault == "none" else []
            options = json.dumps({"nixl": nixl, "prefiller": others, "limits": PEERS})
            command = [sys.executable, str(HERE / "fault_server.py"), str(chat_engine), fault, options]
            found.servers.append(stack.enter_context(running(command, root / f"log{number}", "toy")))
        yield found


def cached(answer: Any) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def text(answer: Any) -> str:
    return answer["choices"][0]["text"]


def test_bytes_come_while_the_prompt_runs(hosts: Hosts, tmp_path: Path) -> None:
    server, name, prompt = hosts.servers[1], new_kv_name(), "d" + LONG
    wish = {"do_remote_decode": True, "remote_engine_id": name}
    body = {"model": "toy", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": wish}
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(server.ask("POST", "/v1/completions", body).json))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", f"/v1/kv/{name}", headers={"prefer": "wait=30"})
    asking.start()
    response = connection.getresponse()
    assert response.status == 200 and response.getheader("transfer-encoding") == "chunked"
    found = response.read1()
    assert found and asking.is_alive()  # six steps are still to come
    found += response.read()
    connection.close()
    asking.join()
    assert answers[0]["kv_transfer_params"]["remote_engine_id"] == name
    (tmp_path / name).write_bytes(found)
    reader, tokens = KVReader(tmp_path, name), list[int]()
    while (part := reader.part()) is not None:
        tokens += part.tokens
        reader.done(part)
    assert reader.ended and bytes(tokens) == prompt.encode()[: len(tokens)] and len(tokens) >= 396
    reader.close()
    hosts.check_nothing_is_left()
    for path in (f"/v1/kv/{name}", f"/v1/kv/{name}/pieces", "/v1/kv/else"):
        assert server.ask("GET", path).status == 404


@pytest.mark.parametrize("giver", [0, 1], ids=["nixl", "http"])
def test_a_prompt_is_computed_on_another_host(giver: int, hosts: Hosts) -> None:
    expected = text(hosts.servers[2].complete(f"x{giver}" + LONG, max_tokens=8))
    thread, answers = hosts.asking(giver, f"y{giver}" + LONG)
    assert hosts.servers[giver].metric("icc:num_requests_running") == 1  # most of the prompt is still to come
    thread.join()
    answers.append(hosts.ask(giver, f"z{giver}" + LONG))
    for answer in answers:
        assert cached(answer) >= 396 and text(answer) == expected
    hosts.check_nothing_is_left()
    assert hosts.log(giver).count("method=DELETE path=/v1/kv/") == (0 if giver else 2)
    without = f"127.0.0.1:{hosts.servers[1].port} has no NIXL"
    assert hosts.log(2).count(without) == giver  # one line


def test_a_prefill_that_hangs_is_given_up_and_comes_back(hosts: Hosts) -> None:
    """The KV that has arrived is used. For a while the server is not asked again, and prompts are computed here."""
    expected, server = text(hosts.servers[2].complete("??" + LONG, max_tokens=8)), hosts.servers[1]
    thread, answers = hosts.asking(1, "h?" + LONG)
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        thread.join(40)
        assert answers and text(answers[0]) == expected and 60 <= cached(answers[0]) < 396
        assert f"127.0.0.1:{server.port} computes no prompt: its health check failed" in hosts.log(2)
        again = hosts.ask(1, "i?" + LONG)
        assert text(again) == expected and cached(again) == 0
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    time.sleep(PEERS["PEER_AVOID_S"])
    back = hosts.ask(1, "j?" + LONG)
    assert text(back) == expected and cached(back) >= 396
    hosts.check_nothing_is_left()


_OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\xff\r\n\r\n",
        b"x" * (3 << 20),
        b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n",
        _OK + b"\r\n{}",
        _OK + b"content-length: 10\r\n\r\nabc",
        _OK + b"content-length: \xb2\r\n\r\nabc",
        _OK + b"transfer-encoding: chunked\r\n\r\n-5\r\nabcdef\r\n0\r\n\r\n",
        _OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        _OK + b"transfer-encoding: chunked\r\n\r\n5\r\nab",
    ],
    ids=range(10),
)
def test_an_answer_that_is_none_is_an_error_that_is_caught(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        writer.close()

    async def check() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises((OSError, ValueError, EOFError)):  # what Prefillers takes for: it computes nothing
            async with asked(f"127.0.0.1:{port}", "GET", "/", "") as found:
                await found.whole(1 << 20)
        server.close()

    asyncio.run(asyncio.wait_for(check(), 30))


@pytest.mark.parametrize("victim", ["nixl", "engine", "server"])  # the last one is not restarted
def test_a_prefill_that_dies_halfway_ends_in_a_recompute(victim: str, hosts: Hosts) -> None:
    prompt, giver = f"{victim[0]}?" + LONG, 1 if victim == "server" else 0
    expected = text(hosts.servers[2].complete("??" + LONG, max_tokens=8))
    thread, answers = hosts.asking(giver, prompt)
    server = hosts.servers[giver]
    children = psutil.Process(server.process.pid).children()
    named = {"nixl": ("fake_nixl", "mover_main"), "engine": ("--worker",), "server": ()}[victim]
    lines = {child.pid: " ".join(child.cmdline()) for child in children}
    pids = [pid for pid, line in lines.items() if any(word in line for word in named)] or [server.process.pid]
    assert (pids == [server.process.pid]) == (victim == "server")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    thread.join(60)
    assert answers and text(answers[0]) == expected
    if victim == "nixl":  # a new mover continues, or the rest comes over HTTP
        assert cached(answers[0]) >= 396
    else:
        assert 60 <= cached(answers[0]) < 396  # the KV that had arrived was used
        assert f"127.0.0.1:{server.port} computes no prompt" in hosts.log(2)
    if victim == "engine":
        server.wait_until(lambda: server.ask("GET", "/ready").status == 200)
    hosts.check_nothing_is_left()
