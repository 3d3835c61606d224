"""Processes of `icc serve` and of routers, and HTTP requests to them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from environments import environment as make_environment  # noqa: E402

MODEL = "served"


def environment(name: str, *packages: str) -> Path:
    """The folder of programs of an environment, which is made in build/routers if it is missing."""
    return make_environment(name, list(packages), "routers").parent


def version(programs: Path, package: str) -> str:
    """The version of a package in an environment."""
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([programs / "python", "-c", ask], capture_output=True, text=True).stdout.strip()


def free_ports(count: int) -> list[int]:
    """`count` ports that no process listens on."""
    with contextlib.ExitStack() as held:
        found = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in found]


def ask(url: str, body: Any = None, timeout: float = 120) -> Any:
    """The JSON answer of a GET, or of a POST with a body; RuntimeError with the answer if its status is an error."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url} answers {error.code}: {error.read()[:300].decode(errors='replace')}") from error


def until(check: Callable[[], Any], seconds: float = 120) -> None:
    """Wait until `check` is true; errors count as false. AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            if check():
                return
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


@contextlib.contextmanager
def process(command: Sequence[str | Path], log: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process until the end of the block, its output in `log`."""
    with log.open("w") as stream:
        started = subprocess.Popen(list(map(str, command)), stdout=stream, stderr=stream, text=True)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(30)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


@dataclass
class Server:
    """A running `icc serve`."""

    port: int
    process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name: str) -> float:
        """The value of the first sample of a metric."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return float(re.findall(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)[0])

    def kill_engine(self) -> None:
        """Send SIGKILL to its engine process; the server starts another one."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        [engine] = [pid for pid in listed if "worker_main" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(int(engine), signal.SIGKILL)


@contextlib.contextmanager
def icc(engine: Path, name: str, port: int, *options: str) -> Iterator[Server]:
    """Run `icc serve` with one thread on a port until the end of the block."""
    command = [sys.executable, "-m", "icc.compiler.cli", "serve", str(engine), "--port", str(port), "--threads", "1"]
    log = ROOT / "build" / "routers" / f"{name}.log"
    with process([*command, "--served-model-name", MODEL, *options], log) as started:
        server = Server(port, started)
        until(lambda: ask(f"{server.url}/ready"))
        yield server
