"""Pinned host memory that keeps KV blocks of preempted requests."""

from __future__ import annotations

import numpy as np

from ...errors import CapacityError, DeviceError
from ...format.kv import KVMemory
from ..cpu.memory import available_bytes
from .driver import Cuda

_DEFAULT_BYTES = 4 << 30
_SHARE = 0.25  # default share of the available host memory: pinned memory cannot be paged out


def choose_host_blocks(cache: KVMemory, most: tuple[int, ...], nbytes: int | None) -> KVMemory:
    """How many blocks to keep in at most `nbytes` of host memory; None: in a share of the available memory.

    most: how many blocks of each group a full batch of full sequences needs. If the device has that many, no request is
    ever preempted.
    """
    none = tuple(0 for _ in most)
    if all(have >= wanted for have, wanted in zip(cache.num_blocks, most, strict=True)):
        return KVMemory(cache.layout, none)
    budget = min(_DEFAULT_BYTES, int(available_bytes() * _SHARE)) if nbytes is None else nbytes
    return KVMemory(cache.layout, cache.layout.split(budget, none, most))


def pin_blocks(cuda: Cuda, host: KVMemory) -> np.ndarray:
    """Pinned memory for these blocks, uint8 `[nbytes]`; CapacityError if the driver cannot pin it."""
    nbytes = host.nbytes
    try:
        return cuda.pinned(nbytes)
    except DeviceError as error:
        raise CapacityError(
            f"cannot pin {nbytes / 2**30:.2f} GiB of host memory for preempted requests: {error.message}",
            "give it less with --swap-gib; with 0 their KV is computed again",
        ) from error
