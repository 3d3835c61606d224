"""The cluster that a command joins, or starts."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .library import end_haproxy, import_ray, prepare_own
from .resources import ReplicaPlace


def address_of(given: str | None) -> str:
    """The address of the cluster to join; None: that in RAY_ADDRESS. "" if a cluster is to be started here."""
    return given or os.environ.get("RAY_ADDRESS") or ""


@contextlib.contextmanager
def joined(given: str | None) -> Iterator[Any]:
    """The package ray, in a context in which this process is part of a cluster: the one at the address (None: at
    RAY_ADDRESS), or one that is started here and ends with the context. UsageError if there is no cluster at the
    address; MissingExtraError without Ray."""
    address = address_of(given)
    with tempfile.TemporaryDirectory(prefix="icc-ray-") as folder:
        if not address:
            prepare_own(Path(folder))
        ray = import_ray()
        _join(ray, address)
        try:
            yield ray
        finally:
            if not address:
                ray.serve.shutdown()
            ray.shutdown()
            end_haproxy(Path(folder))


def _join(ray: Any, address: str) -> None:
    own = {} if address else {"include_dashboard": False}
    try:
        ray.init(address=address or "local", namespace="serve", logging_level="warning", **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        words = str(error).strip().splitlines()[:1] or ["no answer"]
        raise UsageError(f"--ray-address {address}: {words[0]}", "start a cluster: ray start --head") from error


def has_room(place: ReplicaPlace) -> bool:
    """Whether a machine of this process's cluster has the free resources for one more replica now."""
    ray: Any = import_ray()
    from ray._private.state import available_resources_per_node  # pyright: ignore[reportMissingImports]

    return ray.is_initialized() and any(place.fits(free) for free in available_resources_per_node().values())
