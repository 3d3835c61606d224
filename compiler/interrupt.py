"""Ctrl-C ends a compile at once: the compilers that it started, what it has half written, and then the process.

Python raises KeyboardInterrupt between two of its own instructions. A thread that waits for a compiler, or a product of
large matrices, may keep it waiting much longer than a user does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it
GRACE_S = 0.5  # for the main thread to unwind by itself
_processes: set[subprocess.Popen[Any]] = set()
_half_written: set[Path] = set()


@contextlib.contextmanager
def ends_at_once() -> Iterator[None]:
    """In this block Ctrl-C ends the process within a second, with exit code 130; for commands, not for libraries.

    As always it raises KeyboardInterrupt in the main thread. Where that does not leave the block soon, because native
    code runs, a second thread ends the process, if the native code has released the interpreter's lock.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(ear,), daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        _end()  # rather than let the libraries take themselves down, which has taken them a second
    finally:
        signal.set_wakeup_fd(before)
        mouth.close()


@contextlib.contextmanager
def removed_if_interrupted(path: Path) -> Iterator[None]:
    """What is at `path` is half written until the block ends; who leaves the block otherwise removes it himself."""
    _half_written.add(path)
    try:
        yield
    finally:
        _half_written.discard(path)


@contextlib.contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process of a compiler with all that it starts, which `end_processes` ends; it does not outlive the block."""
    process = subprocess.Popen(command, process_group=0, **options)
    _processes.add(process)
    try:
        yield process
    finally:
        _kill(process)
        process.wait()
        _processes.discard(process)


def end_processes() -> None:
    """End what runs in `running`: whoever waits for it goes on at once."""
    for process in list(_processes):
        _kill(process)


def _kill(process: subprocess.Popen[Any]) -> None:
    if process.returncode is None:  # nobody has waited for it: its number is its own
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _watch(ear: socket.socket) -> None:
    """Hears of signals even while the main thread is in native code."""
    with ear:
        while heard := ear.recv(1):
            if heard[0] != signal.SIGINT:
                continue
            ear.settimeout(GRACE_S)
            with contextlib.suppress(TimeoutError):
                while ear.recv(16):  # more Ctrl-C, until the block is left
                    pass
                return
            _end()


def _end() -> None:
    end_processes()
    for path in list(_half_written):
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write("\ninterrupted\n")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(INTERRUPTED)
