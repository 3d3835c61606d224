"""Trial: after a step failed as a whole, finds the request at fault by running fewer requests at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection


class Trial:
    """The requests of a failed step, in groups that run one after the other, with no other requests beside them.

    A group that fails is split in two. Only a request that was alone in a failed step is at fault; a request that gets
    a token is cleared. One bad request among n is found in about 2 log2(n) steps, and no other request ends.
    """

    def __init__(self) -> None:
        self._groups: deque[list[int]] = deque()
        self._uncleared: set[int] = set()  # requests of the group on trial
        self.running = False  # whether a group is on trial or waiting for it

    @property
    def group_done(self) -> bool:
        """Whether all requests of the group on trial are cleared or have ended."""
        return self.running and not self._uncleared

    def failed(self, stepped: Collection[int]) -> int | None:
        """Record that a step of these requests failed. Returns the culprit; None if it may be one of several, which are
        then tried in two halves."""
        self.running = True
        self._uncleared.clear()
        ordered = sorted(stepped)
        if len(ordered) == 1:
            return ordered[0]
        half = len(ordered) // 2
        self._groups.extendleft([ordered[half:], ordered[:half]])
        return None

    def next_group(self, live: Collection[int]) -> list[int]:
        """Put the next group that has live requests on trial; empty if the trial is over."""
        while self._groups:
            group = [request_id for request_id in self._groups.popleft() if request_id in live]
            if group:
                self._uncleared.update(group)
                return group
        self.running = False
        return []

    def clear(self, request_id: int) -> None:
        """Clear a request: it got a token, or has ended."""
        self._uncleared.discard(request_id)
