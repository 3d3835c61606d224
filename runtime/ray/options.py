"""RayOptions: the options of `icc serve --ray` and `icc.ray.deployment`. Imports nothing from Ray."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import UsageError
from ..settings import setting

MOST_REPLICAS = 1024
PROXIES = {
    "every": "one on each machine that has a replica",
    "head": "one, on the machine where the cluster was started",
}


def autoscale(text: str) -> tuple[int, int]:
    """The least and the most replicas, from a text such as "1-4". ValueError for any other text."""
    found = re.fullmatch(r"(\d{1,4})-(\d{1,4})", text.strip())
    least, most = (int(part) for part in found.groups()) if found else (0, 0)
    if not 1 <= least <= most <= MOST_REPLICAS:
        raise ValueError(f"{text!r} is not LEAST-MOST, such as 1-4, with at most {MOST_REPLICAS}")
    return least, most


@dataclass(frozen=True)
class RayOptions:
    """How an engine is served by a Ray cluster.

    ray: whether to use Ray. address: of the cluster to join, see `ray.init`; None starts one that ends with the
    command. app: the name of the application; a running one of that name is upgraded. scale: the least and most
    replicas. cpus: CPUs that Ray reserves for each replica, and kernel threads of a CPU engine. resources: others that
    a machine must have, by Ray's names. detach: leave the application running and return.
    """

    ray: bool = setting(False, "Serve with the machines of a Ray cluster; needs Ray.")
    address: str | None = setting(
        None,
        "Join this cluster; auto: the one that this machine belongs to.",
        names="--ray-address",
        metavar="ADDRESS",
        unset="RAY_ADDRESS, else one is started here",
    )
    app: str = setting("icc", "Name of the application; a running one is upgraded.", names="--ray-app", metavar="NAME")
    scale: tuple[int, int] | None = setting(
        None,
        "As many replicas as the queue and the KV caches need.",
        names="--ray-autoscale",
        metavar="LEAST-MOST",
        unset="--replicas",
        read=autoscale,
    )
    cpus: float | None = setting(
        None,
        "CPUs that Ray reserves for a replica; threads of a CPU engine.",
        names="--ray-cpus",
        metavar="N",
        unset="CPU engine: --threads or the cores of this machine; GPU engine: 1",
    )
    resources: tuple[str, ...] = setting(
        (), "Another resource that a replica's machine must have; repeatable.", names="--ray-resource", metavar="NAME=N"
    )
    proxies: str = setting("every", "Where requests come in.", names="--ray-proxies", values=lambda: PROXIES)
    detach: bool = setting(False, "Return once the engine is served, and leave it running.", names="--ray-detach")

    def __post_init__(self) -> None:
        if self.cpus is not None and not 0 < self.cpus <= 4096:
            raise UsageError(f"--ray-cpus {self.cpus:g} is not from above 0 to 4096")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", self.app):
            raise UsageError(f"--ray-app {self.app!r} is no name", "letters, digits, dots, dashes")
        _ = self.named_resources

    @property
    def named_resources(self) -> dict[str, float]:
        """The values of --ray-resource by name. UsageError for one that is not NAME=N."""
        found: dict[str, float] = {}
        for text in self.resources:
            name, _, number = text.partition("=")
            if not re.fullmatch(r"[^\s=,]{1,100}", name) or not re.fullmatch(r"\d{1,6}(\.\d{1,4})?", number):
                raise UsageError(f"--ray-resource {text!r} is not NAME=N", "give --ray-resource a100=1")
            found[name] = float(number)
        return found
