"""How Ray is imported: with the settings that icc needs of Ray Serve, and one line where it is missing."""

from __future__ import annotations

import os
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
    # a client that says nothing for so long is gone; streams may be longer than Ray's proxies allow by default
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "3600",
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
}


def prepare() -> None:
    """Set what Ray Serve needs in this process, and in those that it starts. Before Ray is imported."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def import_ray() -> ModuleType:
    """The package ray. MissingExtraError where it, or Ray Serve's part of it, is not installed."""
    prepare()
    try:
        import ray
        import ray.serve
    except ImportError as error:
        words = f"Ray Serve is not installed ({error.name or error})"
        raise MissingExtraError(words, install("ray")) from None
    return ray
