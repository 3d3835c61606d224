"""`python -m icc.runtime.executor.cpu.rank_main FD`: one rank's process. FD: its socket."""

from __future__ import annotations

import socket
import sys

from ..rank_processes import Follow, RankReady, open_rank, run_rank
from .library import KernelLibrary
from .rank_group import CpuRankHello
from .ranked import FollowingDevice


def start(hello: CpuRankHello, shared: int, connection: socket.socket) -> tuple[RankReady, Follow]:
    """Load this rank's program; the returned function runs what rank 0 posts in the shared memory until rank 0 ends."""
    engine = open_rank(hello, hello.isa, lambda image, name: KernelLibrary(image, name).digest_pieces)
    return RankReady(), FollowingDevice(engine, hello, shared).follow


if __name__ == "__main__":
    sys.exit(run_rank(int(sys.argv[1]), CpuRankHello, start))
