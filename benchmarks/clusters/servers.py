"""Servers as processes, for the scripts of this folder."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Server:
    """A running server, and the name of its model."""

    process: subprocess.Popen[str]
    url: str
    model: str


def free_port() -> int:
    """A port that no process listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def started(engine: str | Path, options: Sequence[str], seconds: float = 180) -> Iterator[Server]:
    """Run `icc serve ENGINE` with these options until the end of the block."""
    port = free_port()
    command = [sys.executable, "-m", "icc.compiler.cli", "serve", str(engine), "--port", str(port), *options]
    log = Path(f"/tmp/icc-served-{port}.log")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    try:
        end = time.monotonic() + seconds
        assert process.stdout is not None
        line = next((line for line in process.stdout if "serving" in line), "")  # Ray prints other lines too
        assert "serving" in line and time.monotonic() < end, (line, log.read_text()[-3000:])
        yield Server(process, f"http://127.0.0.1:{port}", Path(engine).name.removesuffix(".engine"))
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()
        log.unlink()
