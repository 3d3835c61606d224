"""How Ray is imported: with the settings of Ray Serve that icc needs, and with a one-line error if Ray is missing."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType

from ..errors import MissingExtraError, install

# Environment variables that Ray Serve reads when it is imported, in every process of a cluster; see docs/clusters.md. A
# variable that is set already is not changed.
SETTINGS = {
    # requests go from HAProxy straight to a replica's own HTTP server, not through Ray's proxies and its object store
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # a replica's HTTP server and the engine's client share one event loop, so that no token waits for another thread;
    # Ray's access log, which repeats icc's, is buffered
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # the replica is chosen by the prefix of the prompt, which is in the request's body
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    # bytes of a body that HAProxy buffers for that, at a cost of 2 x this x connections; Ray's default is 8 MiB
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": str(256 << 10),
    # when replicas change, HAProxy is restarted; the old process serves its streams for so many seconds (default 120)
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    # a replica that ends stays reachable for so many seconds, until every HAProxy knows (default 30)
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    "RAY_USAGE_STATS_ENABLED": "0",  # no usage reports
}


def prepare() -> None:
    """Set the environment variables of Ray Serve for this process and its children; call it before Ray is imported."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def prepare_own(folder: Path) -> None:
    """As `prepare`, for a cluster on this machine alone that ends with this process: HAProxy has its files in `folder`,
    and ports that are free."""
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
    """End the HAProxy processes that were started with files in `folder`: one with open streams outlives its
    cluster."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if words and words[0].endswith(b"haproxy") and any(os.fsencode(folder) in word for word in words):
                os.kill(int(entry.name), signal.SIGKILL)


def import_ray() -> ModuleType:
    """The package ray. MissingExtraError if Ray or Ray Serve is not installed."""
    prepare()
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.serve  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        words = f"Ray Serve is not installed ({error.name or error})"
        raise MissingExtraError(words, install("ray")) from None
    return ray
