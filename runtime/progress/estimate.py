"""Estimate: the remaining time of work, from its speed so far, without jumps."""

from __future__ import annotations

_SPEED = 1.15  # an estimate changes by at most this factor per second, besides the passing second itself
_SURE_S = 1.0  # seconds before the first estimate
_OVERDUE = 0.25  # at least this share of the time since the last update is assumed to be left
_LEAST_S = 1.0  # seconds; below this an estimate is not limited, because a factor has no meaning


class TimeEstimate:
    """The seconds left for work whose parts are measured by their cost (bytes, elements, tokens), not by their number.

    The rest is assumed to take as long, per amount, as the finished part took on average. A part without news for a
    while is assumed to take at least a quarter longer. The shown estimate moves towards this value by at most 15 % per
    second, so that slower parts and new phases show gradually. The caller gives the time, in seconds.
    """

    def __init__(self, now: float) -> None:
        self.start = now
        self._done = self._total = 0.0
        self._began = (now, 0.0)  # start of the current phase: the time, and how much was done then
        self._heard_at = now
        self._shown: float | None = None
        self._shown_at = now

    @property
    def share(self) -> float | None:
        """The finished share of the current phase, 0 to 1; None if the total is unknown."""
        return min(self._done / self._total, 1.0) if self._total > 0 else None

    def update(self, done: float, total: float, now: float) -> None:
        """Record that at `now` (seconds) `done` of `total` is done.

        If the total changed, or less is done than before, a new phase begins now. Work that is already done then, such
        as cached objects, counts as having taken no time.
        """
        if total != self._total or done < self._done:
            self._began = (now, done)
        self._done, self._total, self._heard_at = done, total, now

    def left(self, now: float) -> float | None:
        """The estimated seconds left at `now`; None while there is no estimate."""
        since, before = self._began
        work, silent = self._done - before, now - self._heard_at
        if work <= 0 or now - since < _SURE_S:
            target = None
        else:
            expected = (self._heard_at - since) * max(self._total - self._done, 0.0) / work
            target = max(expected - silent, _OVERDUE * silent)
        self._shown = self._towards(target, now - self._shown_at)
        self._shown_at = now
        return self._shown

    def _towards(self, target: float | None, passed: float) -> float | None:
        if self._shown is None:
            return target
        expected = max(self._shown - passed, 0.0)
        if target is None:  # a new phase: the shown estimate counts down until more is known
            return expected
        factor = _SPEED**passed
        least = max(expected, _LEAST_S) / factor - _LEAST_S
        # it may grow from the shown value, not from what is left of it: a few seconds could never grow again
        return min(max(target, least), max(self._shown, _LEAST_S) * factor)


def clock(seconds: float) -> str:
    """Seconds as a text: 0:07, 12:40 or 1:02:03."""
    whole = int(seconds + 0.5)
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def rounded(seconds: float) -> float:
    """Seconds rounded to an honest precision: to 1 s below 20 s, to 5 s below 2 minutes, then to about 5 %."""
    for below, step in ((20, 1), (120, 5), (600, 15), (3600, 60)):
        if seconds < below:
            return round(seconds / step) * step
    return round(seconds / 300) * 300
