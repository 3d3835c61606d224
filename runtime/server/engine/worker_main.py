"""`python -m icc.runtime.server.engine.worker_main FD OPTIONS`: the engine process. FD: its socket; OPTIONS: JSON."""

from __future__ import annotations

import gc
import signal
import socket
import sys
import time

import msgspec

from ...errors import IccError
from ...llm import load
from ...speculate.typical import LOSSLESS
from .channel import Channel
from .grammars import LlguidanceGrammars
from .messages import Fatal
from .parent import die_with_parent
from .worker import Worker


class LoadOptions(msgspec.Struct, frozen=True):
    """How the engine process loads its engine; the fields are those of `icc.load`."""

    engine: str
    threads: int | None = None
    isa: str | None = None
    verify: bool = True
    kv_bytes: int | None = None
    swap_bytes: int | None = None
    spec: str | None = None
    spec_accept: str = LOSSLESS


def main(arguments: list[str]) -> int:
    start = time.perf_counter()
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # the HTTP process gets them too, drains, and then ends this one
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    options = msgspec.json.decode(arguments[1], type=LoadOptions)
    try:
        llm = load(
            options.engine,
            threads=options.threads,
            isa=options.isa,
            verify=options.verify,
            kv_bytes=options.kv_bytes,
            swap_bytes=options.swap_bytes,
            spec=options.spec,
            spec_accept=options.spec_accept,
        )
    except IccError as error:
        channel.send(Fatal(error.message, error.hint, error.exit_code))
        return error.exit_code
    with llm:
        grammars = LlguidanceGrammars.of(llm)
        gc.collect()
        gc.freeze()  # what is here now stays; a step need not wait until it has been looked at again
        Worker(llm, channel, grammars).run(time.perf_counter() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
