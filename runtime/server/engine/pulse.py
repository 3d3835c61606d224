"""Pulse: a thread that reports during a long step that an engine process still works."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event, Thread

from .channel import Channel, ChannelClosed
from .messages import HEARTBEAT_S, Working

# Seconds of CPU time between two checks that count as work. A thread of a rank that waits for another rank polls it 20
# times a second, which takes 0.4 ms between two checks.
_WORK_S = 0.01
Clock = Callable[[], float]


def _others() -> float:
    """Seconds of CPU time of all threads but this one, which also runs in a process that hangs."""
    return time.process_time() - time.thread_time()


def _time_of(pid: int) -> float:
    """Seconds of CPU time of another process (Linux); 0 if it has ended."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the clock id, as from clock_getcpuclockid(3)
    except OSError:
        return 0.0


def cpu_clocks(pids: Sequence[int] = ()) -> list[Clock]:
    """Clocks of CPU time, in seconds: of this process without the calling thread, and of the processes `pids`."""
    return [_others, *(partial(_time_of, pid) for pid in pids)]


class Pulse:
    """Sends `Working` over a channel every HEARTBEAT_S in which a process of an engine used at least _WORK_S of CPU
    time, until `stop`. The time is not summed over checks, because that of waiting would add up.

    For engines whose kernels run in these processes: one that waits for a GPU may use CPU time by waiting. clocks: see
    `cpu_clocks`. halted: whether no work counts, because one of the processes is suspended.
    """

    def __init__(self, channel: Channel, clocks: Sequence[Clock], halted: Callable[[], bool] = lambda: False) -> None:
        self._channel, self._clocks, self._halted = channel, clocks, halted
        self._stopped = Event()
        Thread(target=self._run, name="icc-pulse", daemon=True).start()

    def stop(self) -> None:
        """Stop sending."""
        self._stopped.set()

    def _run(self) -> None:
        used = [clock() for clock in self._clocks]
        while not self._stopped.wait(HEARTBEAT_S):
            before, used = used, [clock() for clock in self._clocks]
            if self._halted() or max(now - then for now, then in zip(used, before, strict=True)) < _WORK_S:
                continue
            try:
                self._channel.send(Working())
            except ChannelClosed:  # the worker notices it itself
                return
