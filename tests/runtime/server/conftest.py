"""Servers of toy engines, run as users run them: `icc serve` in a process of its own, with clients over sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from icc.runtime.format.manifest import SamplingDefaults

from .chat_templates import QWEN_2_5

HERE = Path(__file__).parent


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def events(self) -> list[Any]:
        """The events of a stream, which must end with [DONE]."""
        lines = [line.removeprefix("data: ") for line in self.raw.decode().split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


@dataclass
class Served:
    """A running server. `model` is the name of its model."""

    process: subprocess.Popen[str]
    port: int
    model: str
    log: Path
    key: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """One request on a new connection. A body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = dict(headers or {})
        if self.key is not None:
            headers.setdefault("Authorization", f"Bearer {self.key}")
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def complete(self, prompt: Any = "a", **fields: Any) -> Any:
        """The JSON of /v1/completions; its status must be 200."""
        reply = self.ask("POST", "/v1/completions", {"model": self.model, "prompt": prompt, **fields})
        assert reply.status == 200, reply.raw
        return reply.events if fields.get("stream") else reply.json

    def chat(self, messages: Any = "a", **fields: Any) -> Any:
        """The JSON of /v1/chat/completions; its status must be 200."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        reply = self.ask("POST", "/v1/chat/completions", {"model": self.model, "messages": messages, **fields})
        assert reply.status == 200, reply.raw
        return reply.events if fields.get("stream") else reply.json

    def metric(self, name: str) -> float:
        """The sum of all samples of a metric."""
        text = self.ask("GET", "/metrics").raw.decode()
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        assert found, name
        return sum(map(float, found))

    def wait_until(self, check: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < end, f"did not happen in {seconds} s; log: {self.log.read_text()[-2000:]}"
            time.sleep(0.02)

    @property
    def engine_pid(self) -> int:
        """The process id of the only engine process."""
        [pid] = self.engine_pids
        return pid

    @property
    def engine_pids(self) -> list[int]:
        """The process ids of the engine processes: all children of the server except its sandbox."""
        found: list[int] = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has died, and its parent has not waited for it
                if "sandbox_main" not in " ".join(child.cmdline()):
                    found.append(child.pid)
        return found

    def stream(self, prompt: str, **fields: Any) -> Stream:
        """A streamed completion whose headers have arrived."""
        return Stream(self, {"model": self.model, "prompt": prompt, "stream": True, **fields})

    def idle(self) -> bool:
        """Whether no request runs or waits, and no KV block is in use."""
        names = ("icc:num_requests_running", "icc:num_requests_waiting", "icc:kv_cache_usage_perc")
        return all(self.metric(name) == 0 for name in names)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


class Stream:
    """A streamed answer that is read event by event, or dropped."""

    def __init__(self, server: Served, body: dict[str, Any]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self._connection.request("POST", "/v1/completions", json.dumps(body).encode())
        self._response = self._connection.getresponse()
        self.status = self._response.status

    def event(self) -> Any:
        """The next event; None for [DONE]."""
        line = self._response.readline().decode()
        assert self._response.readline() in (b"\n", b""), line
        text = line.removeprefix("data: ").strip()
        return None if text == "[DONE]" else json.loads(text)

    def rest(self) -> list[Any]:
        """The remaining events, before [DONE]."""
        events = []
        while (event := self.event()) is not None:
            events.append(event)
        return events

    def drop(self, reset: bool = False) -> None:
        """Close the connection without reading the rest. reset: by a TCP reset."""
        sock = self._connection.sock
        if sock is not None and reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._response.close()
        self._connection.close()


StartServer = Callable[..., Served]


@pytest.fixture(scope="session")
def chat_engine(write_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy engine that counts upwards, with a tokenizer of bytes and a chat template that has tools."""
    config = json.dumps({"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": QWEN_2_5})
    return write_engine(
        tmp_path_factory.mktemp("served") / "toy.engine",
        tokenizer_files={"tokenizer_config.json": config},
        max_seq_len=4096,
        max_batch_size=8,
        max_step_tokens=256,
        sampling=SamplingDefaults(temperature=0.0),  # the model's default; without it, requests are sampled
    )


@contextlib.contextmanager
def running(command: list[str], log: Path, model: str, key: str | None = None, wait: bool = True) -> Iterator[Served]:
    """A server process that runs until the end of the block."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    try:
        port = 0
        if wait:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = re.search(r"https?://\S+:(\d+)$", line.strip())
            assert match, (line, log.read_text())
            port = int(match[1])
        served = Served(process, port, model, log, key)
        yield served
        served.stop()
    finally:
        process.kill()
        process.wait()


def serve_command(engine: Path, *options: str) -> list[str]:
    """The command of `icc serve` on a free port."""
    command = [sys.executable, "-m", "icc.compiler.cli", "serve", str(engine), "--port", "0", "--threads", "1"]
    return [*command, *options]


@pytest.fixture
def start(tmp_path: Path, chat_engine: Path) -> Iterator[StartServer]:
    """start(*options, engine=..., key=...): an `icc serve` for this test alone."""
    with contextlib.ExitStack() as stack:
        count = 0

        def begin(*options: str, engine: Path = chat_engine, key: str | None = None, wait: bool = True) -> Served:
            nonlocal count
            count += 1
            command = serve_command(engine, *options)
            if key is not None:
                (tmp_path / "keys").write_text(f"# keys\n{key}\n")
                command += ["--api-key-file", str(tmp_path / "keys")]
            log = tmp_path / f"log{count}"
            return stack.enter_context(running(command, log, engine.name.removesuffix(".engine"), key, wait))

        yield begin


@pytest.fixture(scope="session")
def served(chat_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that tests share; each must leave it idle."""
    with running(serve_command(chat_engine), tmp_path_factory.mktemp("log") / "log", "toy") as server:
        yield server


@pytest.fixture
def idle_after(served: Served) -> Iterator[None]:
    """The shared server must be idle after the test."""
    yield
    served.wait_until(served.idle)


@pytest.fixture
def start_faulty(tmp_path: Path, chat_engine: Path) -> Iterator[StartServer]:
    """start_faulty(fault, **serve options): a server over the fake device of fault_server.py, for one test."""
    with contextlib.ExitStack() as stack:

        def begin(fault: str, **options: Any) -> Served:
            script = str(HERE / "fault_server.py")
            command = [sys.executable, script, str(chat_engine), fault, json.dumps(options)]
            return stack.enter_context(running(command, tmp_path / f"log-{fault}", "toy"))

        yield begin


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model answers by a script and calls tools: the one of benchmarks/clients."""
    folder = tmp_path_factory.mktemp("scripted")
    command = [sys.executable, str(HERE.parents[2] / "benchmarks" / "clients" / "scripted.py"), str(folder)]
    with running(command, folder / "log", "scripted") as server:
        yield server
