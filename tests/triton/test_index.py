"""Top-k, gather, scatter, embedding and row selection against the ops' references: ties, edges, strides, clamping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from icc.compiler.backends.errors import CodegenError
from icc.compiler.backends.triton.layouts.affine import AffineGroups
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.ops import OPS
from icc.compiler.weights.formats.affine import GroupAffine
from interpreting import make_kernel, run_kernel
from torch import Tensor

TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i32": torch.int32}
SHAPE = Shape(16, False)


def padded(x: Tensor, extra: int = 3) -> Tensor:
    """The rows with `extra` unused elements after each: [rows, width + extra]."""
    flat = x.flatten(1)
    return torch.cat([flat, torch.full((len(flat), extra), 77, dtype=x.dtype)], 1)


def empty(x: Tensor) -> Tensor:
    """A padded output for rows like those of x."""
    return torch.full_like(padded(x), 66)


def check(y: Tensor, expected: Tensor) -> None:
    """Check that values are equal, NaN included, and that nothing is written after the rows."""
    width = expected[0].numel()
    torch.testing.assert_close(y[:, :width].view_as(expected), expected, rtol=0, atol=0, equal_nan=True)
    assert (y[:, width:] == 66).all()


def facts(*tensors: Tensor | None) -> dict[str, tuple[object, ...]]:
    """`types` and `aligned` of operands."""
    names = {dtype: name for name, dtype in TORCH.items()}
    return {
        "types": tuple(names[t.dtype] if t is not None else "" for t in tensors),
        "aligned": (False,) * len(tensors),
    }


@pytest.mark.parametrize(
    ("outer", "n", "k", "largest", "kind"),
    [(2, 33, 5, True, "f32"), (2, 33, 33, False, "f32"), (1, 9, 1, True, "i32"), (3, 300, 8, True, "bf16"),
     (1, 5, 3, False, "i32"), (1, 2000, 3, True, "f32"), (5, 1, 1, True, "f16")],
)  # fmt: skip
def test_topk(outer: int, n: int, k: int, largest: bool, kind: str) -> None:
    """Few different values, so that many are equal."""
    torch.manual_seed(n)
    x = torch.randint(-3, 4, (3, outer, n)).to(TORCH[kind])
    values, indices = OPS["topk"].reference(x, k, largest)
    flat, y, at = padded(x), empty(values), empty(indices.int())
    kernel = make_kernel(
        "topk", outer=outer, n=n, k=k, largest=largest,
        strides={"x": flat.shape[1], "values": y.shape[1], "indices": at.shape[1]}, **facts(flat, y, at),
    )  # fmt: skip
    run_kernel(kernel, [flat], [y, at], shape=SHAPE)
    check(y, values)
    check(at, indices.int())


@pytest.mark.parametrize("largest", [True, False])
def test_topk_edges(largest: bool) -> None:
    """NaN counts as the largest, -0.0 as 0.0, and all values of a line may be minus infinity."""
    x = torch.tensor([[1.0, torch.nan, torch.inf, -0.0, 0.0, -torch.inf, torch.nan], [-torch.inf] * 7, [torch.nan] * 7])
    values, indices = OPS["topk"].reference(x, 7, largest)
    y, at = empty(values), empty(indices.int())
    strides = {"x": 7, "values": 10, "indices": 10}
    kernel = make_kernel("topk", outer=1, n=7, k=7, largest=largest, strides=strides, **facts(x, y, at))
    run_kernel(kernel, [x], [y, at], shape=SHAPE)
    check(y, values)
    check(at, indices.int())


def test_topk_names_its_limit() -> None:
    with pytest.raises(CodegenError, match="16384"):
        make_kernel("topk", outer=1, n=128256, k=50)


@pytest.mark.parametrize("kind", ["f32", "bf16", "i32"])
@pytest.mark.parametrize(("outer", "n", "m"), [(2, 7, 4), (1, 3, 1100), (3, 5, 1)])
def test_gather(kind: str, outer: int, n: int, m: int) -> None:
    torch.manual_seed(n)
    x, index = (torch.randn(3, outer, n) * 9).to(TORCH[kind]), torch.randint(0, n, (3, outer, m)).int()
    expected = OPS["gather"].reference(x, index)
    wild = index.clone()
    wild[0, 0, 0], expected[0, 0, 0] = n + 5, x[0, 0, -1]
    flat, places, y = padded(x), padded(wild), empty(expected)
    kernel = make_kernel(
        "gather", outer=outer, n=n, m=m,
        strides={"x": flat.shape[1], "index": places.shape[1], "y": y.shape[1]}, **facts(flat, places, None, y),
    )  # fmt: skip
    run_kernel(kernel, [flat, places, None], [y], shape=SHAPE)
    check(y, expected)


@pytest.mark.parametrize("one_line", [False, True])
def test_gather_by_experts(one_line: bool) -> None:
    x = torch.randn(3, 40) if one_line else torch.randn(3, 2, 40)
    order = torch.stack([torch.randperm(40) for _ in range(5)]).int()
    index = torch.tensor([[4, 0], [7, 1], [-1, 2]]).int()
    expected = OPS["expert_columns"].reference(x, order, index)
    flat, experts, y = padded(x), padded(index), empty(expected)
    types = facts(flat, order, experts, y)
    kernel = make_kernel(
        "gather", outer=2, n=40, m=40, experts=5, one_line=one_line,
        strides={"x": flat.shape[1], "expert": experts.shape[1], "y": y.shape[1]}, **types,
    )  # fmt: skip
    run_kernel(kernel, [flat, order, experts], [y], shape=SHAPE)
    check(y, expected)


@pytest.mark.parametrize("kind", ["f32", "i32"])
@pytest.mark.parametrize(("outer", "n", "m"), [(2, 7, 4), (1, 1030, 20), (3, 1, 1)])
@pytest.mark.parametrize(("accumulate", "value"), [(False, None), (True, None), (False, -3.0), (True, 1.0)])
def test_scatter(kind: str, outer: int, n: int, m: int, accumulate: bool, value: float | None) -> None:
    torch.manual_seed(n)
    x = (torch.randn(3, outer, n) * 9).to(TORCH[kind])
    index = torch.stack([torch.randperm(n)[:m] for _ in range(3 * outer)]).view(3, outer, m).int()
    if accumulate:
        index[:, :, -1] = index[:, :, 0]  # added twice
    source = None if value is not None else (torch.randn(3, outer, m) * 9).to(TORCH[kind])
    expected = OPS["scatter"].reference(x, index, source, value or 0.0, accumulate)
    flat, places, src, y = padded(x), padded(index), None if source is None else padded(source), empty(x)
    kernel = make_kernel(
        "scatter", outer=outer, n=n, m=m, reduce="add" if accumulate else "none", value=value or 0.0,
        strides={"x": flat.shape[1], "index": places.shape[1], "src": src.shape[1] if src is not None else 0,
                 "y": y.shape[1]},
        **facts(flat, places, src, y),
    )  # fmt: skip
    run_kernel(kernel, [flat, places, src], [y], shape=SHAPE)
    check(y, expected)


def test_scatter_of_infinity_skips_what_is_outside() -> None:
    x, index, y = torch.ones(1, 4), torch.tensor([[2, -1, 4]], dtype=torch.int32), torch.zeros(1, 4)
    kernel = make_kernel("scatter", outer=1, n=4, m=3, value="-inf", **facts(x, index, None, y))
    run_kernel(kernel, [x, index, None], [y], shape=SHAPE)
    assert y.tolist() == [[1.0, 1.0, -torch.inf, 1.0]]


@pytest.mark.parametrize(("table", "out"), [("f32", "f32"), ("bf16", "f32"), ("f16", "f16"), ("bf16", "bf16")])
@pytest.mark.parametrize("n", [1, 96, 1100, 2048])
def test_embedding(table: str, out: str, n: int) -> None:
    w = torch.randn(9, n).to(TORCH[table])
    ids = torch.tensor([0, 8, 3, 3, 99, -1], dtype=torch.int32)
    expected = w[[0, 8, 3, 3, 8, 0]].to(TORCH[out])
    y = empty(expected)
    kernel = make_kernel("embedding", n=n, strides={"y": n + 3}, table_rows=9, stored=table, **facts(ids, w, y))
    run_kernel(kernel, [ids, w], [y], shape=SHAPE)
    check(y, expected)


@pytest.mark.parametrize("out", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("bits", "rows", "n", "group"),
    [(8, 9, 64, 64), (4, 33, 96, 32), (8, 5, 1200, 16), (4, 130, 2048, 128), (8, 37, 48, 16)],
)
def test_embedding_reads_the_codes_of_a_product(bits: int, rows: int, n: int, group: int, out: str) -> None:
    rng = np.random.default_rng(n)
    codes = rng.integers(0, 2**bits, (rows, n)).astype(np.uint8)
    zeros = rng.integers(0, 2**bits, (rows, n // group)).astype(np.uint8)
    layout = AffineGroups.of(GroupAffine(group, bits))
    packed = layout.pack({"codes": codes, "scales": rng.random((rows, n // group), np.float32), "zeros": zeros})
    parts = layout.unpack(packed, (rows, n))
    spread = [np.repeat(parts[name].astype(np.float32), group, axis=1) for name in ("zeros", "scales")]
    ids = torch.tensor([0, rows - 1, 3, 3, 999, -1], dtype=torch.int32)
    expected = torch.from_numpy((codes - spread[0]) * spread[1])[ids.long().clamp(0, rows - 1)].to(TORCH[out])
    y = empty(expected)
    kernel = make_kernel(
        "embedding", n=n, strides={"y": n + 3}, table_rows=rows, stored=f"q{bits}g{group}",
        types=("i32", "u8", out), aligned=(False,) * 3,
    )  # fmt: skip
    run_kernel(kernel, [ids, torch.from_numpy(packed)], [y], shape=SHAPE)
    check(y, expected)


def test_embedding_names_a_format_that_it_lacks() -> None:
    w = torch.zeros(9, 64)
    with pytest.raises(CodegenError, match="'q3g16'"):
        make_kernel("embedding", n=64, table_rows=9, stored="q3g16", **facts(w, w, w))


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_select_rows(kind: str) -> None:
    x, rows = torch.randn(5, 70).to(TORCH[kind]), torch.tensor([4, 1, 9], dtype=torch.int32)
    flat, expected = padded(x), x[[4, 1, 4]]
    y = empty(expected)
    kernel = make_kernel("select_rows", n=70, rows="logit_rows", strides={"x": 73, "y": 73}, **facts(flat, y))
    run_kernel(
        kernel, [flat], [y], shape=SHAPE, batch={"logit_rows": rows}, sizes={"num_tokens": 5, "num_logit_rows": 3}
    )
    check(y, expected)
