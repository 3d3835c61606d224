"""Pulse: says from a thread of its own that an engine process works, while a step takes long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event, Thread

from .channel import Channel, ChannelClosed
from .messages import HEARTBEAT_S, Working

# Seconds of CPU time from one look to the next that are work. A thread of a rank that waits for another rank looks 20
# times a second whether that is gone, which takes 0.4 ms from one look to the next.
_WORK_S = 0.01
Clock = Callable[[], float]


def _others() -> float:
    """Seconds of CPU time of all threads but this one, which looks at the clock in a process that hangs, too."""
    return time.process_time() - time.thread_time()


def _time_of(pid: int) -> float:
    """Seconds of CPU time of another process of this Linux; 0 of one that has ended."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the clock's number, as clock_getcpuclockid(3) makes it
    except OSError:
        return 0.0


def cpu_clocks(pids: Sequence[int] = ()) -> list[Clock]:
    """The CPU time in seconds of this process, asked in the thread that sends, and of the processes `pids`."""
    return [_others, *(partial(_time_of, pid) for pid in pids)]


class Pulse:
    """Sends `Working` over a channel whenever one of the processes of an engine has used some CPU time since the last
    look, until `stop`. What it has used before that does not count: waiting adds up, too.

    For engines whose kernels run in these processes: one that waits for a GPU may use CPU time by waiting. clocks: see
    `cpu_clocks`. halted: whether no work counts, because one of the processes is stopped.
    """

    def __init__(self, channel: Channel, clocks: Sequence[Clock], halted: Callable[[], bool] = lambda: False) -> None:
        self._channel, self._clocks, self._halted = channel, clocks, halted
        self._stopped = Event()
        Thread(target=self._run, name="icc-pulse", daemon=True).start()

    def stop(self) -> None:
        """Say no more."""
        self._stopped.set()

    def _run(self) -> None:
        used = [clock() for clock in self._clocks]
        while not self._stopped.wait(HEARTBEAT_S):
            before, used = used, [clock() for clock in self._clocks]
            if self._halted() or max(now - then for now, then in zip(used, before, strict=True)) < _WORK_S:
                continue
            try:
                self._channel.send(Working())
            except ChannelClosed:  # the worker finds that out itself
                return
