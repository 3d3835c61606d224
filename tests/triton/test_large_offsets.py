"""Memory of large GPUs: pages and table rows beyond 2^31 elements, in sparse memory maps."""

from __future__ import annotations

import mmap

import pytest
import torch
from attention_cases import Layer, Step
from icc.compiler.backends.triton.spec import Shape
from interpreting import make_kernel, run_kernel
from paged import Pool
from paged import cache as kv_cache
from torch import Tensor

LAYER = Layer(4, 2, 128, 128)
BLOCK_SIZE = 64
MAP_NORESERVE = 0x4000  # Linux's; Python names it from 3.13 on


def sparse(rows: int, row_bytes: int) -> Tensor:
    """Zeros, uint8 `[rows, row_bytes]`, whose pages take memory when first touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, rows * row_bytes, flags=flags), dtype=torch.uint8).view(rows, row_bytes)


def first_far_page(pool: Pool) -> int:
    """The first page that lies entirely beyond 2^31 elements of the cache's type."""
    return 2**31 // (pool.block_bytes // (1 if pool.dtype == "i8" else 2)) + 1


@pytest.mark.parametrize("cache", ["f16", "i8"])
@pytest.mark.parametrize("decode", [True, False])
def test_attention_reads_far_pages(cache: str, decode: bool) -> None:
    sequences = [(70, 1), (3, 1)] if decode else [(70, 2), (0, 5)]
    step = Step(LAYER, sequences, cache, BLOCK_SIZE)
    near = step.run(decode)
    base, pages = first_far_page(step.pool), step.pool.bytes
    step.pool.bytes = sparse(base + len(pages), step.pool.block_bytes)
    step.pool.bytes[base:] = pages
    step.block_tables = step.block_tables + base
    assert torch.equal(step.run(decode), near)


@pytest.mark.parametrize("cache", ["f16", "i8"])
def test_keys_are_written_to_far_pages_and_moved_there(cache: str) -> None:
    torch.manual_seed(0)
    kernel = make_kernel(
        "kv_write", **kv_cache(2, 128, 128, cache, BLOCK_SIZE), types=("f16", "f16", "", ""), aligned=(True,) * 4,
    )  # fmt: skip
    k, v = torch.randn(2, 256).half(), torch.randn(2, 256).half()
    found = []
    far = first_far_page(Pool(2, 128, 128, cache, BLOCK_SIZE, 1))
    for base in (0, far):
        pool = Pool(2, 128, 128, cache, BLOCK_SIZE, 1)
        pool.bytes = sparse(base + 2, pool.block_bytes)
        slots = torch.tensor([1, BLOCK_SIZE + 5], dtype=torch.int32) + base * BLOCK_SIZE
        moves = torch.stack([slots.flip(0)[:1], slots[:1] + 7], dim=1)
        for count in (0, 1):  # written, and moved in the next step
            batch = {"positions": slots * 0, "slot_mapping": slots if not count else slots * 0 - 1, "moves": moves}
            sizes = {"num_moves": count}
            run_kernel(kernel, [k, v, None, None], [], shape=Shape(8, False), batch=batch, sizes=sizes, kv=pool.bytes)
        found.append([pool.read(int(slot)) for slot in (*slots, slots[0] + 7)])
    for near, distant in zip(*found, strict=True):
        assert all(torch.equal(a, b) and a.any() for a, b in zip(near, distant, strict=True))


def test_rows_of_large_tables_are_found() -> None:
    n = 4096
    rows = 2**31 // n + 3
    table = sparse(rows, 2 * n)
    table[-1] = torch.arange(2 * n) % 100
    ids, y = torch.tensor([rows - 1, 5], dtype=torch.int32), torch.full((2, n), 66, dtype=torch.float16)
    kernel = make_kernel(
        "embedding", n=n, table_rows=rows, stored="f16", types=("i32", "f16", "f16"), aligned=(True,) * 3
    )
    run_kernel(kernel, [ids, table], [y], shape=Shape(8, False))
    assert torch.equal(y[0], table[-1].view(torch.float16)) and not y[1].any()
