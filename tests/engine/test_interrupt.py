"""Ctrl-C ends a compile at once: exit code 130, nothing half written, no compiler left running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from icc.compiler.interrupt import Processes
from sizes import soak

pytestmark = pytest.mark.slow


def wait_for(file: Path, process: subprocess.Popen[str]) -> str:
    """Wait until the process has written a file; returns its content."""
    while not file.exists() or not file.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return file.read_text()


def ended(*pids: int) -> bool:
    """Whether all processes end in time; a zombie has ended."""
    end = time.monotonic() + 60
    while any(map(_runs, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def interrupted(process: subprocess.Popen[str], number: int = signal.SIGINT) -> str:
    """Send Ctrl-C to the command alone; returns its standard error once it has ended with the code for this signal."""
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + number and "Traceback" not in said and "interrupted" in said, said
    return said


@pytest.fixture
def slow_compiler(tmp_path: Path) -> Path:
    """A C++ compiler that starts another process and never ends; it writes both process ids to a file."""
    script = tmp_path / "slow-g++"
    script.write_text(f'#!/bin/sh\nsleep 600 &\necho "$$ $!" > {tmp_path}/pids\nwait\n')
    script.chmod(0o755)
    return script


def test_while_compilers_run(compiled: Callable[..., Any], slow_compiler: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-m", "icc", "compile", str(compiled("llama").checkpoint), "-o", str(out / "e.engine")]
    environment = {**os.environ, "CXX": str(slow_compiler)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    pids = [int(pid) for pid in wait_for(tmp_path / "pids", process).split()]
    assert list(out.iterdir())  # the half-written engine
    interrupted(process)
    assert list(out.iterdir()) == []
    assert ended(*pids)


NATIVE = """
import hashlib, pathlib, sys
from icc.compiler import interrupt
half = pathlib.Path(sys.argv[1])
half.mkdir()
with interrupt.ends_at_once(), interrupt.removed_if_interrupted(half), interrupt.Processes() as all, all.running(
    ["sleep", "600"]
) as process:
    (half / "pid").write_text(str(process.pid))
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # native code that takes half an hour
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_native_code_runs(number: int, tmp_path: Path) -> None:
    half = tmp_path / "half"
    process = subprocess.Popen([sys.executable, "-c", NATIVE, str(half)], stderr=subprocess.PIPE, text=True)
    pid = int(wait_for(half / "pid", process))
    interrupted(process, number)
    assert list(tmp_path.iterdir()) == [] and ended(pid)


def test_who_waits_for_a_compiler_goes_on_and_none_is_started_any_more(tmp_path: Path) -> None:
    """The effect of a KeyboardInterrupt in a process that continues, such as a notebook that calls icc.compile."""
    with Processes() as compilers, ThreadPoolExecutor(2) as pool:

        def wait(script: str) -> int:
            with compilers.running(["sh", "-c", script]) as process:
                return process.wait()

        waiting = pool.submit(wait, f"sleep 600 & echo $! > {tmp_path}/pid; wait")
        while not (file := tmp_path / "pid").exists() or not file.read_text():
            time.sleep(0.01)
        compilers.end()
        assert waiting.result(120) == -signal.SIGKILL and ended(int(file.read_text()))
        with pytest.raises(KeyboardInterrupt):
            pool.submit(wait, "true").result()


def written(files: set[Path]) -> dict[Path, int]:
    """The modification time of each file that exists, in ns."""
    found: dict[Path, int] = {}
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            found[file] = file.stat().st_mtime_ns
    return found


@pytest.mark.parametrize(
    ("quant", "stores"),
    soak(
        ("gptq4", ["quantize-gptq"]),
        ("awq4", ["quantize-awq"]),
        ("int8", ["quantize-smooth"]),
        ("awqgptq4", ["quantize-awq", "quantize-gptq"]),
        ("auto", ["quantize-auto-measured", "quantize-auto-[0-9a-f]*"]),
    ),
)
def test_a_calibration_that_was_killed_goes_on_to_the_same_bytes(quant: str, stores: list[str], tmp_path: Path) -> None:
    """SIGKILL once in each part of the calibration; finished parts are not computed again."""
    model = Path(__file__).parents[2] / "samples" / "pystd"
    command = [sys.executable, "-m", "icc", "compile", str(model), "--target", "native", "--quant", quant, "--rotate"]
    command += ["--calib-sequences", "6", "--calib-length", "256", "-o"]

    def start(name: str, cache: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / cache)}
        return subprocess.Popen([*command, str(tmp_path / name)], stderr=subprocess.PIPE, text=True, env=environment)

    whole = start("whole", "a")
    assert whole.wait(1800) == 0, whole.communicate()
    for store in stores:
        process, found = start("resumed", "b"), set[Path]()
        while len(found) < 9:
            assert process.poll() is None, process.communicate()
            found = set((tmp_path / "b/icc/calibrations").glob(f"*/{store}/0*.safetensors"))
            time.sleep(0.02)
        process.kill()
        process.communicate()
    times, seen = written(found), dict[Path, int]()
    resumed = start("resumed", "b")
    while resumed.poll() is None:
        seen |= written(found)
        time.sleep(0.02)
    assert resumed.returncode == 0, resumed.communicate()
    assert seen == times and not list((tmp_path / "b/icc/calibrations").iterdir())
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b", "whole", "resumed"}
    for file in ("weights.safetensors", "program.json", "canaries.json"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "resumed" / file).read_bytes()
