"""`python -m icc.runtime.executor.cuda.rank_main FD`: the process of one rank on a GPU. FD: its socket."""

from __future__ import annotations

import socket
import sys
from functools import partial

from ..rank_processes import Follow, RankReady, open_rank, run_rank
from .compat import open_gpu
from .ranked import FollowingCudaDevice, GpuRankHello


def start(hello: GpuRankHello, shared: int, connection: socket.socket) -> tuple[RankReady, Follow]:
    """Load this rank's program onto its GPU; the returned function follows rank 0's orders until rank 0 ends."""
    engine = open_rank(hello)
    device = FollowingCudaDevice(engine, hello, shared, open_gpu(engine.manifest.backend, hello.device))
    assert device.peers is not None
    return RankReady(memory=device.peers.handle), partial(device.follow, connection)


if __name__ == "__main__":
    sys.exit(run_rank(int(sys.argv[1]), GpuRankHello, start))
