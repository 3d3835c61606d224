"""`icc serve --ray`: starts or joins a cluster, deploys an engine there, and waits for a signal to end."""

from __future__ import annotations

import queue
import re
import signal
import socket
import sys
import time
from typing import Any

from ..errors import IccError, UsageError
from ..server.http.serve import check_bind
from ..server.options import ServeOptions
from .app import deployment, planned
from .cluster import address_of, joined
from .library import import_ray
from .options import RayOptions

_LISTEN_S = 120.0
_SAID = re.compile(r"icc\.runtime\.errors\.\w+: (.+)")  # the error in a replica's traceback


def serve(options: ServeOptions, ray_options: RayOptions) -> int:
    """Serve an engine with the machines of a cluster; returns the exit code. SIGTERM ends it after running requests
    have ended; SIGHUP deploys the engine that is in the directory now. IccError if the engine or the cluster cannot be
    used."""
    planned(options, ray_options)  # refuses wrong options before anything starts
    check_bind(options.host, options.api_key_file is not None)
    if ray_options.detach and not address_of(ray_options.address):
        raise UsageError("--ray-detach leaves the engine in a cluster", "ray start --head, and --ray-address auto")
    with joined(ray_options.address) as ray:
        return _serve(ray, options, ray_options)


def _serve(ray: Any, options: ServeOptions, ray_options: RayOptions) -> int:
    signals = _signals()
    host, port = _start(options, ray_options)
    _deploy(options, ray_options)
    _wait_until_listening(host, port)
    print(f"serving {ray_options.app} on http://{host}:{port}", flush=True)
    if ray_options.detach:
        return 0
    while signals.get() == signal.SIGHUP:
        _again(options, ray_options)
    ray.serve.delete(ray_options.app)
    return 0


def _signals() -> queue.SimpleQueue[int]:
    """A queue of the signals that arrive. A second SIGTERM or SIGINT raises KeyboardInterrupt at once, also while Ray
    blocks."""
    found: queue.SimpleQueue[int] = queue.SimpleQueue()
    ends: list[int] = [signal.SIGTERM, signal.SIGINT]

    def got(number: int, frame: object) -> None:
        found.put(number)
        if number in ends:
            ends.append(number)
        if len(ends) > 3:
            raise KeyboardInterrupt

    for number in (*ends, signal.SIGHUP):  # after ray.init, which sets its own handlers
        signal.signal(number, got)
    return found


def _start(options: ServeOptions, ray_options: RayOptions) -> tuple[str, int]:
    """Start Ray Serve; returns the host and port on which it listens."""
    serve: Any = import_ray().serve
    from ray.exceptions import RayError  # pyright: ignore
    from ray.serve.config import HTTPOptions, ProxyLocation  # pyright: ignore[reportMissingImports]

    places = {"every": ProxyLocation.EveryNode, "head": ProxyLocation.HeadOnly}
    port = options.port or _free_port(options.host)
    http = HTTPOptions(host=options.host, port=port, root_path=options.root_path)
    try:
        serve.start(proxy_location=places[ray_options.proxies], http_options=http)
    except (RayError, TimeoutError):  # Ray restarts a proxy that was slow to start
        serve.start(proxy_location=places[ray_options.proxies], http_options=http)
    return options.host, port


def _wait_until_listening(host: str, port: int) -> None:
    """Wait until HAProxy accepts connections. IccError if it does not within _LISTEN_S seconds."""
    end = time.monotonic() + _LISTEN_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=5).close()
        except OSError as error:
            if time.monotonic() > end:
                raise IccError(f"Ray Serve does not listen on {host}:{port}", "is the port taken?") from error
            time.sleep(0.1)


def _deploy(options: ServeOptions, ray_options: RayOptions) -> None:
    """Deploy the application, or upgrade a running one. IccError if the replicas cannot be started."""
    serve: Any = import_ray().serve
    try:
        serve.run(deployment(options, options=ray_options), name=ray_options.app, route_prefix="/")
    except RuntimeError as error:
        raise IccError(f"Ray could not start the engine: {_why(ray_options.app) or _last(str(error))}") from error


def _again(options: ServeOptions, ray_options: RayOptions) -> None:
    try:
        _deploy(options, ray_options)
    except IccError as error:
        print(f"SIGHUP: the engine stays as it is: {error.message}", file=sys.stderr, flush=True)
    else:
        print("SIGHUP: the engine was deployed anew", file=sys.stderr, flush=True)


def _why(app: str) -> str:
    """Why an application could not start, from its replicas' messages; "" if there are none."""
    serve: Any = import_ray().serve
    found = serve.status().applications.get(app)
    text = "" if found is None else "\n".join(one.message for one in found.deployments.values())
    said = _SAID.findall(text)
    return said[-1] if said else _last(text)


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        return listener.getsockname()[1]
