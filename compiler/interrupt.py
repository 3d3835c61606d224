"""Ctrl-C or SIGTERM ends a compile at once: it ends the compilers it started, removes half-written output, and exits.

Python raises KeyboardInterrupt between two of its own instructions. A thread that waits for a compiler, or a product of
large matrices, may delay it much longer than a user is willing to wait.
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

SIGNALLED = 128  # the exit code is this plus the signal's number, as in shells: 130 after Ctrl-C
GRACE_S = 0.5  # time for the main thread to unwind by itself
_open: set[Processes] = set()
_half_written: set[Path] = set()


@contextlib.contextmanager
def ends_at_once() -> Iterator[None]:
    """In this block Ctrl-C or SIGTERM ends the process within a second; for commands, not for libraries.

    As usual, Ctrl-C raises KeyboardInterrupt in the main thread. If that does not leave the block soon, because native
    code runs, a second thread ends the process, provided that the native code has released the interpreter's lock.
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
        _end(signal.SIGINT)  # without the libraries' own shutdown, which can take a second
    finally:
        signal.signal(signal.SIGTERM, terminates)
        signal.set_wakeup_fd(before)
        mouth.close()


@contextlib.contextmanager
def removed_if_interrupted(path: Path) -> Iterator[None]:
    """Mark `path` as half written until the block ends: it is removed if Ctrl-C ends the process in the block. After an
    exception the caller removes it."""
    _half_written.add(path)
    try:
        yield
    finally:
        _half_written.discard(path)


class Processes:
    """Compiler processes, each in its own process group with its children. A context manager: no process outlives the
    block, or the command if Ctrl-C ends it."""

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
        """Start a process, which does not outlive this block either. KeyboardInterrupt after `end`."""
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
        """End all running processes, so that threads that wait for them continue at once; no more are started."""
        with self._lock:
            self._ended = True
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen[Any]) -> None:
    if process.returncode is None:  # not waited for yet, so its id cannot have been reused
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _watch(ear: socket.socket) -> None:
    """Wait for signals, even while the main thread is in native code."""
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
