"""`ICC_LEAK=KINDS python leaky_server.py ENGINE [icc serve's options]`: `icc serve` with leaks that are added from
outside: in the HTTP process "memory" at each POST request, "files" and "threads" at every 16th; in the engine process
"blocks" at every 16th request that ends. `python leaky_server.py --worker FD OPTIONS LOG` is the engine process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

MEMORY, EVERY = 256 << 10, 16  # bytes per request; requests per leaked thread, file and block
kept: list[Any] = []


def _memory() -> None:
    kept.append(bytearray(os.urandom(1)) * MEMORY)


def _files() -> None:
    kept.append(os.open("/dev/null", os.O_RDONLY))


def _threads() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


LEAKS: dict[str, tuple[int, Callable[[], None]]] = {
    "memory": (1, _memory), "files": (EVERY, _files), "threads": (EVERY, _threads),
}  # fmt: skip


def leak_requests(kinds: list[str]) -> None:
    """Let POST requests leak. kinds: names in LEAKS."""
    from icc.runtime.server.http.access import AccessLog

    call, count = AccessLog.__call__, 0

    async def leaking(self: AccessLog, scope: Any, receive: Any, send: Any) -> None:
        nonlocal count
        if scope.get("method") == "POST":
            count += 1
            for kind in kinds:
                every, leak = LEAKS[kind]
                if count % every == 0:
                    leak()
        await call(self, scope, receive, send)

    AccessLog.__call__ = leaking  # type: ignore[method-assign]


def leak_blocks() -> None:
    """Let every 16th request that ends leak one KV block, while more than half of the blocks are free."""
    from icc.runtime.scheduler.queues import Queues

    remove, count = Queues.remove, 0

    def leaking(self: Queues, request: Any) -> None:
        nonlocal count
        remove(self, request)
        count += 1
        pool = self.kv.groups[0].pool
        if count % EVERY == 0 and pool.num_available > pool.num_blocks // 2:
            pool.allocate(1)

    Queues.remove = leaking  # type: ignore[method-assign]


def main(arguments: list[str]) -> int:
    kinds = [kind for kind in os.environ.get("ICC_LEAK", "").split(",") if kind]
    if arguments[0] == "--worker":
        from icc.runtime.server.engine import worker_main

        if "blocks" in kinds:
            leak_blocks()
        return worker_main.main(arguments[1:])
    from icc.compiler.cli import main as icc
    from icc.runtime.server.api import core

    command = core.worker_command
    core.worker_command = lambda *given: [sys.executable, __file__, "--worker", *command(*given)[-3:]]
    leak_requests([kind for kind in kinds if kind in LEAKS])
    return icc(["serve", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
