"""FairShare: clients that wait are served in turn, in proportion to the tokens that they ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Share:
    """A client with requests: the start tag of its last one, where that ends, and how many there are."""

    start: int = 0
    end: int = 0
    live: int = 0


class FairShare:
    """Start-time fair queueing (Goyal et al. 1996), which needs no clock.

    Each request gets a start tag when it arrives: where its client's last request ends on the scale of tokens asked
    for, but not before the tag of the request that was let in last. Serving in order of tags shares the engine equally
    among the clients that have requests waiting, however many each of them has sent. One client's tags never fall.
    """

    def __init__(self) -> None:
        self._now = 0  # the largest start tag that was let in
        self._shares: dict[str, _Share] = {}

    def arrive(self, client: str, cost: int) -> int:
        """The start tag of a new request that asks for `cost` tokens."""
        share = self._shares.setdefault(client, _Share())
        share.start = max(self._now, share.start, share.end)
        share.end = share.start + cost
        share.live += 1
        return share.start

    def serve(self, start: int) -> None:
        """A request with this tag was let in."""
        self._now = max(self._now, start)

    def leave(self, client: str, unused: int) -> None:
        """A request ended without `unused` of the tokens it asked for; its client's next ones start earlier for it."""
        share = self._shares[client]
        share.live -= 1
        share.end -= unused
        if not share.live:  # all it asked for is served: a later request starts at the present
            del self._shares[client]
