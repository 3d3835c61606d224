"""The orders that rank 0 sends to the other ranks on GPUs: the calls of its device, in order. Arrays go through shared
memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np


class _Order(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", forbid_unknown_fields=True):
    """The base of all orders; each stands for the method of `Device` with its name."""


class Send(_Order, frozen=True, tag="send"):
    """Copy the arrays of a turn from the shared memory to the GPU."""

    turn: int
    num_seqs: int
    num_tokens: int


class Zero(_Order, frozen=True, tag="zero"):
    """Zero `nbytes` bytes of the KV cache from byte `offset` on."""

    offset: int
    nbytes: int


class Copy(_Order, frozen=True, tag="copy"):
    """Copy `nbytes` bytes within the KV cache; source, target: byte offsets."""

    source: int
    target: int
    nbytes: int


class Swap(_Order, frozen=True, tag="swap"):
    """Copy `nbytes` bytes between the KV cache and the host's blocks. cache, host: byte offsets. out: whether to the
    host."""

    out: bool
    cache: int
    host: int
    nbytes: int


class RunStep(_Order, frozen=True, tag="run"):
    """Run a step. phase: its index in the plan. expected: only prepare for it, see `Device.expect`."""

    sizes: dict[str, int]
    phase: int
    section: str
    moves_only: bool = False
    expected: bool = False


class Fetch(_Order, frozen=True, tag="fetch"):
    """End a turn: all orders for it came before this one."""

    turn: int


class Write(_Order, frozen=True, tag="write"):
    """Write `rows`, as bytes, to the buffer `at` (see `SectionArray.at`), after a step of `tokens` tokens: a section
    reads them."""

    at: str
    tokens: int
    rows: bytes


class WritePool(_Order, frozen=True, tag="write_pool"):
    """Write `values` into a pool from `offset` on. only: the rank that does so; -1 for all ranks."""

    name: str
    offset: int
    values: bytes
    only: int = -1


Order = Send | Zero | Copy | Swap | RunStep | Fetch | Write | WritePool


class Meet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """handles: those of the areas (`Peers.handle`) of ranks 0, 1 .. unique_id: of the NCCL communicator; empty if there
    is none."""

    handles: list[bytes]
    unique_id: bytes


class SharedTurns:
    """Anonymous memory that all ranks map: for each turn, the bytes of each array or group of arrays. descriptor: the
    file descriptor of memory that another process made; None: make it."""

    def __init__(self, turns: int, sizes: Sequence[int], descriptor: int | None = None) -> None:
        total = max(turns * sum(sizes), 1)
        if descriptor is None:
            descriptor = os.memfd_create("icc-ranks", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, total)
        self.descriptor = descriptor
        whole = np.frombuffer(mmap.mmap(descriptor, total, flags=mmap.MAP_SHARED), np.uint8)
        ends = np.cumsum([0, *sizes])
        self.sides = [
            [whole[turn * ends[-1] + a : turn * ends[-1] + b] for a, b in pairwise(ends)] for turn in range(turns)
        ]

    def close(self) -> None:
        """Close this rank's mapping; the memory is freed when all ranks have closed theirs."""
        self.sides = []
        os.close(self.descriptor)
