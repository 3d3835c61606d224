"""The keys that an index chooses on GPUs, against float64: shuffled blocks, prefill beside decodes, trees of guesses,
every type of cache."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Layer, Step
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.ops.selecting import LEFT_OUT
from icc.runtime.format.manifest import Limits
from interpreting import make_kernel, run_kernel
from paged import DTYPES, cache
from torch import Tensor

WIDTH = 160  # positions
SEQUENCES = [(0, 9), (70, 1), (0, 0), (40, 5), (3, 2)]


def choose(step: Step, heads: int, count: int, decode: bool) -> tuple[Tensor, Tensor]:
    """The output [tokens, WIDTH] of the kernels, and the weights of heads; asserts that the gap of each row is still
    NaN."""
    dim = step.layer.key_dim
    w = torch.randn(step.tokens, heads + 1).to(DTYPES[step.kind])
    kv = cache(1, dim, dim, step.cache, step.block_size, shared=True)
    strides = {"q": step.q.shape[1], "w": w.shape[1], "o": WIDTH + step.gap}
    types = (step.kind, step.kind, step.kind)
    kernel = make_kernel(
        "choose_keys",
        types=types,
        aligned=(False,) * 3,
        heads=heads,
        count=count,
        width=WIDTH,
        strides=strides,
        **kv,
    )
    o = torch.full((step.tokens, WIDTH + step.gap), torch.nan, dtype=DTYPES[step.kind])
    counts = torch.tensor([0, *(max(n, 1) for _, n in step.sequences)])
    rows = range(len(step.sequences))
    batch = {
        "seq_starts": counts.cumsum(0).to(torch.int32),
        "context_lens": torch.tensor([before + n for before, n in step.sequences], dtype=torch.int32),
        "block_tables": step.block_tables,
        "positions": torch.cat([step.positions(row) for row in rows]).to(torch.int32),
        "tree_masks": torch.cat([step.masks(row) for row in rows]),
    }
    sizes = {"num_tokens": step.tokens, "num_seqs": len(rows), "max_blocks": step.block_tables.shape[1]}
    run_kernel(
        kernel, [step.q, w], [o], shape=Shape(step.tokens, decode), batch=batch, sizes=sizes, kv=step.pool.bytes,
        limits=Limits(WIDTH, 16, 128),
    )  # fmt: skip
    assert o[:, WIDTH:].isnan().all()
    return o[:, :WIDTH].double(), w[:, :heads].double()


def check(step: Step, heads: int, count: int, decode: bool = False) -> None:
    """Check that each token chooses the best of the keys that it sees, except nearly equal ones."""
    rows, weights = choose(step, heads, count, decode)
    left_out = torch.tensor(LEFT_OUT).to(DTYPES[step.kind]).double()
    token = 0
    for row, (before, n) in enumerate(step.sequences):
        positions = step.positions(row)
        places = torch.cat([torch.arange(before), positions])
        for i in range(n):
            seen = torch.ones(before + i + 1, dtype=torch.bool)
            if row in step.trees:
                seen[before:] = step.ancestors(row)[i, : i + 1]
            keys = [at for at in range(before + i + 1) if seen[at]]
            k = torch.stack([step.pool.read(step.slot(row, at))[0][0] for at in keys])
            q = step.q[token, : heads * step.layer.key_dim].double().view(heads, -1)
            score = weights[token] @ torch.relu(q @ k.T)
            added = rows[token, positions[i] - places[keys]]
            chosen = added == 0
            assert bool((chosen | (added == left_out)).all())
            assert chosen.sum() == min(count, len(keys))
            if not chosen.all():
                assert score[chosen].min() >= score[~chosen].max() - LOOSE[step.kind] * score.abs().max()
            token += 1
        token += n == 0


LOOSE = {"f32": 1e-5, "bf16": 2e-2}


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "count"),
    [("f32", 3, 40, 7), ("f32", 70, 16, 64), ("f8", 16, 24, 1), ("i8", 3, 16, 7), ("i4", 5, 40, 7), ("i2", 3, 24, 8)],
)
def test_the_best_keys_are_chosen(dtype: str, heads: int, dim: int, count: int) -> None:
    kind = "f32" if dtype == "f32" else "bf16"
    layer = Layer(heads, 1, dim, dim, shared=True)
    check(Step(layer, SEQUENCES, dtype, kind=kind), heads, count)
    ones = [(before + n - 1, 1) for before, n in SEQUENCES if n]
    check(Step(layer, ones, dtype, kind=kind), heads, count, decode=True)


def test_a_guess_chooses_of_its_ancestors() -> None:
    layer = Layer(4, 1, 16, 16, shared=True)
    check(Step(layer, [(30, 7), (0, 8), (2, 5)], trees={0: [0, 0, 1, 1, 2, 5], 2: [0, 0, 0, 3]}), 4, 5)


def test_of_equal_scores_the_earlier_is_chosen() -> None:
    step = Step(Layer(4, 1, 16, 16, shared=True), [(0, 12), (90, 1)])
    step.q.zero_()
    rows, _ = choose(step, 4, 6, False)
    for t in range(12):
        assert (rows[t, : t + 1] == 0).sum() == min(t + 1, 6) and not rows[t, max(t - 5, 0) : t + 1].any()
    assert not rows[12, 85:91].any() and bool((rows[12, :85] == LEFT_OUT).all())
