"""Packs an adapter for the pools of an engine: the bytes of one slot of each pool."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..format.adapters import AdapterPlan, AdapterSite, Pool
from ..format.bfloat16 import bf16_bits
from .adapter import Adapter
from .base_weights import BaseWeights
from .fitting import Applied, applied

Packed = dict[str, tuple[np.ndarray, ...]]
"""By pool, the bytes of one slot, uint8: one array per rank if ranks have parts, else one for all."""


def pack_slot(plan: AdapterPlan, adapter: Adapter, base: BaseWeights, scale: float = 1.0) -> Packed:
    """The slot bytes of an adapter times `scale`; zeros for layers that it does not change. It must fit, see
    `check_fits`."""
    parts: dict[str, list[tuple[int, np.ndarray]]] = {pool.weight: [] for pool in plan.pools}
    for site, change in applied(plan, adapter, base, scale):
        for pool, row, values in _matrices(site, change):
            parts[pool].append((row, values))
    return {pool.weight: tuple(_by_rank(pool, parts[pool.weight])) for pool in plan.pools}


def _matrices(site: AdapterSite, change: Applied) -> Iterator[tuple[str, int, np.ndarray]]:
    """(pool, first row, float32 values [.., n, k])."""
    yield site.a, site.row, change.a.T if site.table else change.a
    yield site.b, 0, change.b
    for pool, vector in ((site.bias, change.bias), (site.gain, change.gain)):
        if vector is not None:
            yield pool, 0, vector[:, None]


def _by_rank(pool: Pool, parts: list[tuple[int, np.ndarray]]) -> Iterator[np.ndarray]:
    """The part of a slot for each rank, if ranks have parts; else one slot for all."""
    shape = [pool.matrices, pool.n, pool.k]
    if pool.cuts:
        shape[pool.axis] = max(end for own in pool.cuts for _, end in own)
    values = np.zeros(shape, np.float32)
    for row, part in parts:
        values[:, row : row + part.shape[-2], : part.shape[-1]] = part
    if not pool.cuts:
        yield _packed(pool, values)
    for own in pool.cuts:
        pieces = [values.take(range(*piece), pool.axis) for piece in own]
        yield _packed(pool, np.concatenate(pieces, pool.axis)) if pieces else np.zeros(0, np.uint8)


def _packed(pool: Pool, values: np.ndarray) -> np.ndarray:
    padded = -(-pool.n // pool.tile) * pool.tile
    values = np.pad(values, ((0, 0), (0, padded - pool.n), (0, 0)))
    stored = _stored(values, pool.dtype)
    tiles = stored.reshape(pool.matrices, padded // pool.tile, pool.tile, pool.k).swapaxes(2, 3)
    return np.ascontiguousarray(tiles).reshape(-1).view(np.uint8)


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values in the element type of a pool; bf16 as its bits."""
    if dtype == "f32":
        return values
    if dtype == "f16":
        return values.astype(np.float16)
    return bf16_bits(values)


def slot_bytes(packed: Packed) -> int:
    """How many bytes a packed adapter takes in memory."""
    return sum(part.nbytes for parts in packed.values() for part in parts)
