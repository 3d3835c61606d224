"""Child processes: they must not outlive the process that started them, which alone decides when they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_OF_THE_PARENT = (signal.SIGINT, signal.SIGTERM)


def die_with_parent() -> None:
    """Make the kernel kill this process when the process that started it ends for any reason."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


@contextlib.contextmanager
def deaf_to_signals() -> Iterator[None]:
    """Processes that this thread starts within the context never get Ctrl-C or SIGTERM, which terminals and service
    managers send to a whole process group: the parent gets them and ends its children.

    The signals are blocked, which a process inherits. If the process itself ignored them, that would be too late while
    its interpreter and libraries are loaded.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
