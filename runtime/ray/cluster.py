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
    """The address of the cluster to join, RAY_ADDRESS for None; "" where one is to be started here."""
    return given or os.environ.get("RAY_ADDRESS") or ""


@contextlib.contextmanager
def joined(given: str | None) -> Iterator[Any]:
    """The package ray, while this process is of the cluster at an address, of RAY_ADDRESS for None, or of one that is
    started here and ends with the block. UsageError where there is none at the address; MissingExtraError without
    Ray."""
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
    """Whether a machine of the cluster that this process is of has room for one more replica now."""
    ray: Any = import_ray()
    from ray._private.state import available_resources_per_node  # pyright: ignore[reportMissingImports]

    return ray.is_initialized() and any(place.fits(free) for free in available_resources_per_node().values())
