"""An adapter as the pools of an engine hold it: the bytes of one slot of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from ..errors import RequestError
from ..format.adapters import AdapterPlan, AdapterSite, Pool
from ..format.bfloat16 import bf16_bits
from .adapter import Adapter, Change, LowRank

Factors = Callable[[str], np.ndarray]
"""A float32 weight of the engine, by its name."""
_LEFT_OUT = {
    "magnitude": "a magnitude per row (DoRA)",
    "bias": "a bias",
    "whole": "a whole weight (modules_to_save)",
    "rows": "rows of an embedding (trainable tokens)",
    "start": "a base that was changed first (PiSSA, OLoRA)",
}


def check_fits(plan: AdapterPlan, called: str, adapter: Adapter) -> None:
    """RequestError naming the first change for which the engine has no room: of a layer without any, of a larger rank
    or another shape, or of another kind than B (A x)."""
    sites = {site.parameter: site for site in plan.sites}
    for name, change in adapter.changes.items():
        if problem := _problem(plan, sites.get(name), change):
            raise RequestError(
                f"adapter {called}: {name}: {problem}",
                "merge it when the model is compiled (--lora), or compile with the room that it needs (--adapters)",
                field="adapter",
            )


def _problem(plan: AdapterPlan, site: AdapterSite | None, change: Change) -> str:
    if site is None:
        return "the engine has no room for adapters there"
    for field, words in _LEFT_OUT.items():
        if getattr(change, field) is not None:
            return f"the engine cannot compute with {words} beside its own weights"
    if change.low_rank is None:
        return ""
    a, b = change.low_rank.a.shape, change.low_rank.b.shape
    experts = (site.experts,) if site.experts else ()
    if a[:-2] != experts or b[:-2] != experts or (b[-2], a[-1]) != (site.n, site.k) or a[-2] != b[-1]:
        return f"A {list(a)} and B {list(b)} do not fit a weight of {[*experts, site.n, site.k]}"
    return "" if a[-2] <= plan.rank else f"its rank is {a[-2]}, the engine has room for {plan.rank}"


def pack_slot(plan: AdapterPlan, adapter: Adapter, factors: Factors, scale: float = 1.0) -> dict[str, np.ndarray]:
    """By pool, the bytes of one slot, uint8, of an adapter times `scale`; layers that it leaves alone are zeros. It
    must fit, see `check_fits`."""
    parts: dict[str, list[tuple[int, np.ndarray]]] = {pool.weight: [] for pool in plan.pools}
    for site in plan.sites:
        change = adapter.changes.get(site.parameter)
        if change is not None and change.low_rank is not None:
            low_rank = replace(change.low_rank, scale=change.low_rank.scale * scale)
            for pool, row, values in _matrices(site, low_rank, factors):
                parts[pool].append((row, values))
    return {pool.weight: _packed(pool, parts[pool.weight]) for pool in plan.pools}


def _matrices(site: AdapterSite, change: LowRank, factors: Factors) -> Iterator[tuple[str, int, np.ndarray]]:
    """(pool, first row, float32 values [.., n, k]) of A and B, for the weight as the engine has it."""
    a, b = change.a.astype(np.float32, copy=False), change.b * np.float32(change.scale)
    yield site.a, site.row, a * factors(site.columns) if site.columns else a
    yield site.b, 0, b * factors(site.rows)[:, None] if site.rows else b


def _packed(pool: Pool, parts: list[tuple[int, np.ndarray]]) -> np.ndarray:
    padded = -(-pool.n // pool.tile) * pool.tile
    values = np.zeros((pool.matrices, padded, pool.k), np.float32)
    for row, part in parts:
        values[:, row : row + part.shape[-2], : part.shape[-1]] = part
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


def slot_bytes(packed: Mapping[str, np.ndarray]) -> int:
    """Bytes of an adapter in memory."""
    return sum(part.nbytes for part in packed.values())
