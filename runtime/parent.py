"""What a process owes to the one that started it: not to outlive it, and to let it decide when to end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_OF_THE_PARENT = (signal.SIGINT, signal.SIGTERM)


def die_with_parent() -> None:
    """No orphan: the kernel kills this process when the one that started it ends, however that ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


@contextlib.contextmanager
def deaf_to_signals() -> Iterator[None]:
    """Processes that this thread starts in the block never hear Ctrl-C or SIGTERM, which terminals and service managers
    send to a whole group: the one that starts them does, and ends them.

    They are blocked, which a process inherits, rather than ignored by the process itself: that would be too late while
    its interpreter and libraries are loaded.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
