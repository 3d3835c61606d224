"""Pulse: says from a thread of its own that an engine process works, while a step takes long."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Thread

from .channel import Channel, ChannelClosed
from .messages import HEARTBEAT_S, Working

_WORK_S = 0.005  # seconds of CPU time that are work


def _others() -> float:
    """Seconds of CPU time of all threads but this one, which looks at the clock in a process that hangs, too."""
    return time.process_time() - time.thread_time()


class Pulse:
    """Sends `Working` over a channel whenever the process has used some CPU time since, until `stop`.

    For engines whose kernels run in this process: one that waits for a GPU may use CPU time by waiting. cpu_time:
    seconds that the process has used, asked in the thread that sends.
    """

    def __init__(self, channel: Channel, cpu_time: Callable[[], float] = _others) -> None:
        self._channel, self._cpu_time = channel, cpu_time
        self._stopped = Event()
        Thread(target=self._run, name="icc-pulse", daemon=True).start()

    def stop(self) -> None:
        """Say no more."""
        self._stopped.set()

    def _run(self) -> None:
        told = self._cpu_time()
        while not self._stopped.wait(HEARTBEAT_S):
            if (used := self._cpu_time()) - told < _WORK_S:
                continue
            told = used
            try:
                self._channel.send(Working())
            except ChannelClosed:  # the worker finds that out itself
                return
