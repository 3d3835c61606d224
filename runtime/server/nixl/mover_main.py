"""`python -m icc.runtime.server.nixl.mover_main FD`: the NIXL process. FD: its socket.

It is a separate process because anyone who reaches NIXL's ports may reach its memory. It holds published KV files only,
no keys and no model, and its end does not end the server.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys

import msgspec

from ...parent import die_with_parent
from ..engine.frames import SocketFrames
from .library import Agent, make_agent
from .messages import FetchBytes, Forget, FromMover, MoverReady, Publish, ToMover, frame
from .mover import Mover

_POLL_S = 0.0005  # between two checks of running transfers


def main(arguments: list[str]) -> int:
    """Serve until the server has ended; returns the exit code. arguments: the socket's file descriptor."""
    die_with_parent()
    connection = socket.socket(fileno=int(arguments[0]))
    try:
        agent = make_agent(f"icc-{socket.gethostname()}-{os.getpid()}-{os.urandom(8).hex()}")
    except Exception as error:
        connection.sendall(frame(MoverReady(f"{type(error).__name__}: {error}")))
        return 1
    connection.sendall(frame(MoverReady()))
    with contextlib.suppress(OSError):
        serve(connection, agent)
    return 0


def serve(connection: socket.socket, agent: Agent) -> None:
    """Handle messages of a connection until it is closed."""
    mover, frames, decoder = Mover(agent), SocketFrames(connection), msgspec.msgpack.Decoder(ToMover)
    while True:
        answers: list[FromMover] = list(mover.finished())
        readable, _, _ = select.select([connection], [], [], 0 if answers else _POLL_S if mover.busy else None)
        if readable:
            try:
                bodies = frames.read()
            except EOFError:
                return
            for body in bodies:
                answers += _answered(mover, decoder.decode(body))
        for answer in answers:
            connection.sendall(frame(answer))


def _answered(mover: Mover, asked: ToMover) -> list[FromMover]:
    if isinstance(asked, Publish):
        return [mover.publish(asked)]
    if isinstance(asked, FetchBytes):
        failure = mover.fetch(asked)
        return [] if failure is None else [failure]
    assert isinstance(asked, Forget)
    mover.forget(asked.key)
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
