"""Products with experts against float64: slots one by one and sorted, unrouted slots, epilogues, padding."""

from __future__ import annotations

import pytest
import torch
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.ops.body import Body
from icc.compiler.program.steps.linear import Columns, Epilogue
from interpreting import make_kernel, run_kernel
from products import DTYPES, Forced, check, rows, weight
from torch import Tensor

SLOTS = {"decode": 1, "m": 8, "n": 16, "k": 64, "warps": 2, "stages": 2, "splits": 1}
SORTED = {"decode": 0, "m": 16, "n": 32, "k": 64, "warps": 4, "stages": 2, "splits": 1}


def reference(x: Tensor, values: Tensor, bias: Tensor | None, index: Tensor) -> Tensor:
    """The product [rows, topk, n]; x [rows, k] or [rows, topk, k]."""
    slots = x.double() if x.dim() == 3 else x.double().unsqueeze(1).expand(-1, index.shape[1], -1)
    found = torch.zeros(*index.shape, values.shape[1], dtype=torch.float64)
    for e in range(values.shape[0]):
        at = torch.where(index == e)
        found[at] = slots[at] @ values[e].T + (0 if bias is None else bias[e].double())
    return found


@pytest.mark.parametrize("tiling", [SLOTS, SORTED], ids=["slots", "sorted"])
@pytest.mark.parametrize(("kind", "bits", "per_slot"), [("bf16", 0, True), ("bf16", 4, False), ("f16", 8, True)])
def test_products_of_slots(tiling: dict[str, int], kind: str, bits: int, per_slot: bool) -> None:
    torch.manual_seed(0)
    count, topk, experts, n, k = 3 if tiling is SLOTS else 13, 3, 5, 17, 192
    stride = (topk if per_slot else 1) * k + 8
    x, w = rows(count, stride - 8, stride, kind), weight((experts, n, k), kind, bits, 64 if bits else 0)
    bias = torch.randn(experts, n)
    index = torch.randint(0, experts, (count, topk), dtype=torch.int32)
    index[0, 1], index[2, 2] = -1, experts
    y = torch.full((count + 1, topk * n), torch.nan, dtype=DTYPES[kind])
    kernel = make_kernel(
        "expert_linear_q" if bits else "expert_linear", k=k, n=n, experts=experts, topk=topk, x_per_slot=per_slot,
        strides={"x": stride},
        types=(kind, w.kind, "f32", "i32", kind), aligned=(True,) * 5, **w.params,
    )  # fmt: skip
    sizes = {"num_tokens": count}
    inputs = [x, w.packed, bias, index]
    specs = run_kernel(kernel, inputs, [y], shape=Shape(32, False), sizes=sizes, tuner=Forced(tiling))
    assert len(specs) == (1 if tiling is SLOTS else 3)
    given = x[:, : stride - 8].reshape(count, topk, k) if per_slot else x[:, :k]
    check(y, reference(given, w.values, bias, index).reshape(count, -1), kind)


@pytest.mark.parametrize("tiling", [SLOTS, SORTED], ids=["slots", "sorted"])
def test_gated_experts(tiling: dict[str, int]) -> None:
    torch.manual_seed(1)
    count, topk, experts, n, k = 3, 2, 4, 40, 128
    x, w = rows(count, k, k, "bf16"), weight((experts, n, k), "bf16", 4, 64)
    index = torch.randint(0, experts, (count, topk), dtype=torch.int32)
    y = torch.full((count, topk * 20), torch.nan)
    kernel = make_kernel(
        "expert_linear_q", k=k, n=n, experts=experts, topk=topk,
        epilogue=Epilogue(Body.parse("t0 = silu a0; t1 = mul t0 a1"), (Columns(0, 2), Columns(1, 2)), 20),
        types=("bf16", "u8", "", "i32", "f32"), **w.params,
    )  # fmt: skip
    batch = {"context_lens": torch.tensor([7, 1, 0], dtype=torch.int32)}  # the last row only pads a graph
    run_kernel(kernel, [x, w.packed, None, index], [y], shape=Shape(8, True), tuner=Forced(tiling), batch=batch)
    full = reference(x, w.values, None, index)
    full[2] = 0
    check(y, (torch.nn.functional.silu(full[..., ::2]) * full[..., 1::2]).reshape(count, -1), "f32")


def test_float32_experts() -> None:
    torch.manual_seed(2)
    for count, experts in ((2, 3), (20, 9)):
        x, w = rows(count, 48, 48, "f32"), weight((experts, 8, 48), "f32")
        index = torch.randint(0, experts, (count, 2), dtype=torch.int32)
        y = torch.full((count, 16), torch.nan)
        kernel = make_kernel(
            "expert_linear",
            k=48,
            n=8,
            experts=experts,
            topk=2,
            stored="f32",
            types=("f32", "f32", "", "i32", "f32"),
        )
        run_kernel(kernel, [x, w.packed, None, index], [y], shape=Shape(64, False))
        check(y, reference(x, w.values, None, index).reshape(count, -1), "f32")
