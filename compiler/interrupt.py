"""Ctrl-C or SIGTERM ends a compile at once: the compilers it started, what it has half written, and then the process.

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
from typing import Any, NoReturn

SIGNALLED = 128  # the exit code is this and the signal's number, as shells have it: 130 after Ctrl-C
GRACE_S = 0.5  # for the main thread to unwind by itself
_open: set[Processes] = set()
_half_written: set[Path] = set()


@contextlib.contextmanager
def ends_at_once() -> Iterator[None]:
    """In this block Ctrl-C or SIGTERM ends the process within a second; for commands, not for libraries.

    As always Ctrl-C raises KeyboardInterrupt in the main thread. Where that does not leave the block soon, because
    native code runs, a second thread ends the process, if the native code has released the interpreter's lock.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(ear,), daemon=True).start()
    terminates = signal.signal(signal.SIGTERM, lambda number, frame: _end(number))
    try:
        yield
    except KeyboardInterrupt:
        _end(signal.SIGINT)  # rather than let the libraries take themselves down, which has taken them a second
    finally:
        signal.signal(signal.SIGTERM, terminates)
        signal.set_wakeup_fd(before)
        mouth.close()


@contextlib.contextmanager
def removed_if_interrupted(path: Path) -> Iterator[None]:
    """`path` is half written until the block ends, and is removed if Ctrl-C ends the process in it. After an exception
    the caller removes it."""
    _half_written.add(path)
    try:
        yield
    finally:
        _half_written.discard(path)


class Processes:
    """Processes of compilers, each in a group with all that it starts. A context manager: none outlives the block, and
    none outlives the command where Ctrl-C ends it."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[Any]] = set()
        self._ended = False
        self._lock = threading.Lock()

    def __enter__(self) -> Processes:
        _open.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        _open.discard(self)

    @contextlib.contextmanager
    def running(self, command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
        """A process, which does not outlive this block either. KeyboardInterrupt after `end`."""
        with self._lock:
            if self._ended:
                raise KeyboardInterrupt
            process = subprocess.Popen(command, process_group=0, **options)
            self._running.add(process)
        try:
            yield process
        finally:
            with self._lock:
                _kill(process)
                process.wait()
                self._running.discard(process)

    def end(self) -> None:
        """End all that run, so that whoever waits for one goes on at once; none is started any more."""
        with self._lock:
            self._ended = True
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen[Any]) -> None:
    if process.returncode is None:  # nobody has waited for it: its number is its own
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _watch(ear: socket.socket) -> None:
    """Waits for signals, even while the main thread is in native code."""
    with ear:
        while heard := ear.recv(1):
            if heard[0] not in (signal.SIGINT, signal.SIGTERM):
                continue
            ear.settimeout(GRACE_S)
            with contextlib.suppress(TimeoutError):
                while ear.recv(16):  # more Ctrl-C, until the block is left
                    pass
                return
            _end(heard[0])


def _end(number: int) -> NoReturn:
    for processes in list(_open):
        processes.end()
    for path in list(_half_written):
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write("\ninterrupted\n")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(SIGNALLED + number)
