"""The KV write kernel: rotation of both styles, padding tokens, shuffled slots, strided rows, every cache type."""

from __future__ import annotations

import pytest
import torch
from icc.compiler.backends.triton.kernels.kv_cache import pieces
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.ops.attention import rotate
from icc.runtime.batch.packed import PackedBatch
from icc.runtime.batch.scheduled import ScheduledBatch
from icc.runtime.format.batch import BatchLimits
from icc.runtime.kv.upkeep import Upkeep
from interpreting import make_kernel, run_kernel
from paged import CODES, DTYPES, Pool, tables
from paged import cache as kv_cache
from step_making import rotary as rotation

SHAPES = [(1, 8, 8, 8, "half"), (3, 24, 16, 8, "half"), (2, 40, 24, 40, "interleaved"), (18, 16, 16, 0, "half")]
CASES = [(cache, *shape) for cache in ("f32", "bf16", "f16", "i8") for shape in SHAPES]
CASES += [(cache, *shape) for cache in ("f8", "i4", "i2") for shape in [*SHAPES[2:3], (1, 72, 9, 8, "half")]]


@pytest.mark.parametrize(("cache", "heads", "key_dim", "value_dim", "rotary", "style"), CASES)
def test_kv_write(cache: str, heads: int, key_dim: int, value_dim: int, rotary: int, style: str) -> None:
    """Written slots hold the reference's numbers within one rounding; all others still hold the poison."""
    torch.manual_seed(0)
    tokens, extra, block_size = 19, 5, 8
    kind = "bf16" if cache in CODES else cache
    k = torch.randn(tokens, heads * key_dim + extra).to(DTYPES[kind])
    v = torch.randn(tokens, heads * value_dim + extra).to(DTYPES[kind])
    cos, sin = tables(50, rotary, style) if rotary else (None, None)
    slots = torch.randperm(64)[:tokens].to(torch.int32)
    slots[[4, 18]] = -1
    positions = torch.randint(0, 50, (tokens,), dtype=torch.int32)
    pool, expected = (Pool(heads, key_dim, value_dim, cache, block_size, 8) for _ in range(2))
    kernel = make_kernel(
        "kv_write", **kv_cache(heads, key_dim, value_dim, cache, block_size), rotary=rotation(rotary, 50, style),
        strides={"k": k.shape[1], "v": v.shape[1]},
        types=(kind, kind, *(("f32", "f32") if rotary else ("", ""))), aligned=(False,) * 4,
    )  # fmt: skip
    batch = {"positions": positions, "slot_mapping": slots, "moves": torch.zeros(0, 2, dtype=torch.int32)}
    run_kernel(kernel, [k, v, cos, sin], [], shape=Shape(64, False), batch=batch, kv=pool.bytes)

    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key, value = k[i, : heads * key_dim].view(1, heads, -1), v[i, : heads * value_dim].view(heads, -1)
            if cos is not None and sin is not None:
                key = rotate(key.float(), cos[positions[i], None], sin[positions[i], None], style)
            expected.write(slot, key[0].float(), value.float())
    # numbers halfway between codes may be rounded either way; one code of a mixed vector changes all its values a
    # little
    step = {"f32": 1e-6, "bf16": 2**-8, "f16": 2**-11, "i8": 2**-6, "f8": 2**-3, "i4": 2**-3, "i2": 2**-1}[cache]
    for slot in range(64):
        got, wanted = pool.read(slot), expected.read(slot)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=step, atol=step, equal_nan=True)
    untouched = [b for b in range(8) if not any(s // block_size == b for s in slots.tolist() if s >= 0)]
    assert (pool.bytes[untouched] == 255).all()


@pytest.mark.parametrize("cache", ["f32", "i8", "i2"])
@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), [(1, 8, 8), (3, 24, 16)])
def test_accepted_guesses_are_moved(cache: str, heads: int, key_dim: int, value_dim: int) -> None:
    """More moves than are read at a time, some onto slots that others move away from; nothing else changes. The number
    of moves is padded, as executors do."""
    torch.manual_seed(0)
    pool, expected = (Pool(heads, key_dim, value_dim, cache, 8, 12) for _ in range(2))
    for slot in range(96):
        k, v = torch.randn(heads, key_dim), torch.randn(heads, value_dim)
        pool.write(slot, k, v), expected.write(slot, k, v)
    moves = [(10, 9), (12, 10), (13, 11), (15, 12), *((40 + 2 * i, 37 + i) for i in range(20))]
    for source, target in moves:
        block, at = divmod(target, 8)
        for place, x in zip(expected._vectors(block), expected._vectors(source // 8), strict=True):
            place[:, at] = x[:, source % 8]
        if cache in CODES:
            expected._scales(block)[:, :, at] = expected._scales(source // 8)[:, :, source % 8]
    kind = "bf16" if cache in CODES else cache
    kernel = make_kernel(
        "kv_write", **kv_cache(heads, key_dim, value_dim, cache, 8), types=(kind, kind, "", ""), aligned=(True,) * 4,
    )  # fmt: skip
    k, v = torch.zeros(1, heads * key_dim).to(DTYPES[kind]), torch.zeros(1, heads * value_dim).to(DTYPES[kind])
    batch = {name: torch.full((1,), -1, dtype=torch.int32) for name in ("positions", "slot_mapping")}
    packed = PackedBatch(BatchLimits(64, 1, 1, 1), [8])
    packed.pack(ScheduledBatch((), (Upkeep(moves=tuple(moves)),)))
    packed.pad_moves()
    assert packed.num_moves == 32 > len(moves)
    batch["moves"] = torch.tensor(packed.arrays["moves"].tolist(), dtype=torch.int32).view(1, -1, 2)
    sizes = {"num_moves": packed.num_moves}
    run_kernel(kernel, [k, v, None, None], [], shape=Shape(64, False), batch=batch, sizes=sizes, kv=pool.bytes)
    assert torch.equal(pool.bytes, expected.bytes)


@pytest.mark.parametrize("cache", ["i8", "f8", "i4"])
def test_rows_without_finite_numbers_are_marked_in_a_cache_of_codes(cache: str) -> None:
    k, v = torch.ones(3, 8), torch.zeros(3, 8)
    k[0, 3], k[1, 5] = torch.nan, -torch.inf
    pool = Pool(1, 8, 8, cache, 4, 1)
    kernel = make_kernel(
        "kv_write", **kv_cache(1, 8, 8, cache, 4), types=("f32", "f32", "", ""), aligned=(True,) * 4,
    )  # fmt: skip
    batch = {name: torch.arange(3, dtype=torch.int32) for name in ("positions", "slot_mapping", "moves")}
    run_kernel(kernel, [k, v, None, None], [], shape=Shape(64, False), batch=batch, kv=pool.bytes)
    assert pool.read(0)[0].isnan().all() and pool.read(1)[0].isnan().all()
    torch.testing.assert_close(pool.read(2)[0], torch.ones(1, 8).double(), rtol=0, atol=0.5 if cache == "i4" else 1e-6)
    assert all((pool.read(i)[1] == 0).all() for i in range(3))


def test_pieces_pad_little() -> None:
    widths = {dim: [p.width for p in pieces(dim)] for dim in (8, 16, 24, 64, 80, 96, 112, 128, 192, 256)}
    assert widths == {
        8: [16], 16: [16], 24: [32], 64: [64], 80: [64, 16], 96: [64, 32], 112: [128], 128: [128],
        192: [128, 64], 256: [256],
    }  # fmt: skip
    assert [(p.first, p.width) for p in pieces(256, 128)] == [(0, 128), (128, 128)]
    assert all(ps[-1].end >= dim > ps[-1].first for dim in range(1, 300) if (ps := pieces(dim, 64)))
