"""FairShare: serves waiting clients in turn, so that each gets an equal share of tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Share:
    """A client with requests: the start tag and the end of its last request, and the number of its live requests."""

    start: int = 0
    end: int = 0
    live: int = 0


class FairShare:
    """Start-time fair queueing (Goyal et al. 1996), which needs no clock.

    Each request gets a start tag when it arrives: the end of its client's last request, measured in requested tokens,
    but not less than the tag of the last admitted request. Serving in order of tags divides the engine equally among
    clients with waiting requests, however many each has sent. The tags of one client never decrease.
    """

    def __init__(self) -> None:
        self._now = 0  # the largest start tag that was admitted
        self._shares: dict[str, _Share] = {}

    def arrive(self, client: str, cost: int) -> int:
        """The start tag of a new request that asks for `cost` tokens."""
        share = self._shares.setdefault(client, _Share())
        share.start = max(self._now, share.start, share.end)
        share.end = share.start + cost
        share.live += 1
        return share.start

    def serve(self, start: int) -> None:
        """Record that a request with this tag was admitted."""
        self._now = max(self._now, start)

    def leave(self, client: str, unused: int) -> None:
        """Record that a request ended with `unused` of its requested tokens left over; its client's next requests start
        so much earlier."""
        share = self._shares[client]
        share.live -= 1
        share.end -= unused
        if not share.live:  # nothing is left to serve: a later request starts at the current tag
            del self._shares[client]
