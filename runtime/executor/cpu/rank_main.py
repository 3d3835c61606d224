"""`python -m icc.runtime.executor.cpu.rank_main FD`: one rank's process. FD: its socket."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from ...errors import EngineFormatError, IccError
from ...format.load import Engine, begin_opening, read_manifest
from ...parent import die_with_parent
from .library import KernelLibrary
from .rank_group import RankHello, RankReady
from .ranked import FollowingDevice

_MOST = 1 << 20


def _open(hello: RankHello) -> Engine:
    manifest = read_manifest(Path(hello.path))
    if manifest.digest != hello.digest:
        raise EngineFormatError("the engine has changed since rank 0 opened it", "load it again")
    opening = begin_opening(
        hello.path,
        manifest,
        verify=hello.verify,
        isa=hello.isa,
        load_digests=lambda image, name: KernelLibrary(image, name).digest_pieces,
        program=hello.program,
    )
    return opening.finish()


def main(descriptor: int) -> int:
    """Load the engine's program of this rank and follow rank 0 until it ends."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: rank 0 decides when this ends
    with socket.socket(fileno=descriptor) as connection:
        raw, [shared], *_ = socket.recv_fds(connection, _MOST, 1)
        hello = msgspec.msgpack.decode(raw, type=RankHello)
        try:
            engine = _open(hello)
            device = FollowingDevice(engine, hello, shared)
        except IccError as error:
            connection.send(msgspec.msgpack.encode(RankReady(error.message, error.hint)))
            return error.exit_code
        connection.send(msgspec.msgpack.encode(RankReady()))
    device.follow()
    os._exit(0)  # nothing is left to give back: its threads may be between two steps


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
