"""How Ray is imported: with the settings that icc needs of Ray Serve, and one line where it is missing."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType

from ..errors import MissingExtraError, install

# What Ray Serve reads once, in every process of a cluster, when it is imported; see docs/clusters.md. A value that is
# set already stays.
SETTINGS = {
    # requests go from HAProxy straight to a replica's own HTTP server, not through Ray's proxies and its object store
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # a replica's HTTP server and the engine's client share one event loop, so that no token waits for another thread;
    # the access log of Ray, which says what icc's says, is written in pieces
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # whom a request goes to is said by what is in it: without its body, there is no prefix to look for
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    # HAProxy keeps so much of a body for that: 2 x this x connections, by default 8 MiB
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": str(256 << 10),
    # when replicas come and go, HAProxy is started anew; the one before goes on with its streams for so long (120)
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    # a replica that ends stays reachable for so long, until every HAProxy knows; later ones ask another (30)
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
}


def prepare() -> None:
    """Set what Ray Serve needs in this process, and in those that it starts. Before Ray is imported."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def prepare_own(folder: Path) -> None:
    """As `prepare`, for a cluster that is only of this machine and ends with this process: HAProxy has its files in
    `folder`, and ports that others do not have."""
    with ExitStack() as stack:
        ports = [stack.enter_context(socket.create_server(("", 0))).getsockname()[1] for _ in range(2)]
    names = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
    files = {"CONFIG_FILE_LOC": "haproxy.cfg", "SOCKET_PATH": "admin.sock", "METRICS_SOCKET_PATH": "metrics.sock"}
    files |= {"SERVER_STATE_BASE": "", "SERVER_STATE_FILE": "server-state"}
    found = dict(zip(names, map(str, ports), strict=True))
    found |= {f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in files.items()}
    for name, value in found.items():
        os.environ.setdefault(name, value)
    prepare()


def end_haproxy(folder: Path) -> None:
    """End the HAProxy processes that were started with files of `folder`: one that has streams outlives its cluster."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if words and words[0].endswith(b"haproxy") and any(os.fsencode(folder) in word for word in words):
                os.kill(int(entry.name), signal.SIGKILL)


def import_ray() -> ModuleType:
    """The package ray. MissingExtraError where it, or Ray Serve's part of it, is not installed."""
    prepare()
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.serve  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        words = f"Ray Serve is not installed ({error.name or error})"
        raise MissingExtraError(words, install("ray")) from None
    return ray
