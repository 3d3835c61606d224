"""Pinned host memory that keeps KV blocks of preempted requests."""

from __future__ import annotations

import numpy as np

from ...errors import CapacityError, DeviceError
from ...format.program import KVLayout
from ..cpu.memory import available_bytes
from .driver import Cuda

_DEFAULT_BYTES = 4 << 30
_SHARE = 0.25  # of the available host memory, at most, unless told otherwise: pinned memory cannot be paged out


def choose_host_blocks(layout: KVLayout, num_blocks: int, most_blocks: int, nbytes: int | None) -> int:
    """How many blocks to keep in at most `nbytes` of host memory; by default in a share of it.

    most_blocks: what a full batch of full sequences needs. Where the device has that many, nobody is ever preempted.
    """
    if num_blocks >= most_blocks:
        return 0
    budget = min(_DEFAULT_BYTES, int(available_bytes() * _SHARE)) if nbytes is None else nbytes
    return min(budget // max(layout.total_block_bytes(), 1), most_blocks)


def pin_blocks(cuda: Cuda, layout: KVLayout, host_blocks: int) -> np.ndarray:
    """Memory for so many blocks, uint8; CapacityError if the driver cannot pin it."""
    nbytes = host_blocks * layout.total_block_bytes()
    try:
        return cuda.pinned(nbytes)
    except DeviceError as error:
        raise CapacityError(
            f"cannot pin {nbytes / 2**30:.2f} GiB of host memory for preempted requests: {error.message}",
            "give it less with --swap-gib; with 0 their KV is computed again",
        ) from error
