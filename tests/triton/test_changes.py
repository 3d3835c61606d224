"""Products that add the change of each row's adapter, with every tiling; ranges of columns have their own operands."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from icc.compiler.backends.triton.plan import kernel_of
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.ops.body import Body
from icc.compiler.program.steps.linear import AdapterChange, Columns, Epilogue, Extra
from icc.runtime.format.operands import BufferOperand, WeightOperand
from interpreting import run_kernel
from products import Forced, check, rows, weight
from step_making import make_step
from torch import Tensor

SLOTS, RANK, N, K = 3, 32, 48, 448
ENDS = (24, 36, 48)
CUTS = {
    "few rows": {"decode": 1, "m": 8, "n": 16, "k": 64, "warps": 2, "stages": 2, "splits": 1},
    "a tile": {"decode": 0, "m": 16, "n": 32, "k": 64, "warps": 4, "stages": 2, "splits": 1},
    "the last program merges": {"decode": 0, "m": 16, "n": 32, "k": 64, "warps": 4, "stages": 2, "splits": 3},
    "another kernel does": {"decode": 0, "m": 128, "n": 32, "k": 64, "warps": 4, "stages": 2, "splits": 3},
    "two halves": {"decode": 0, "m": 64, "n": 32, "k": 64, "warps": 1, "stages": 2, "splits": 1},
}


class Adapted:
    """A product of random rows with its operands; each row has a slot, none (-1), or one that does not exist."""

    def __init__(self, cut: str, bits: int, kind: str = "bf16", rank: int = RANK) -> None:
        torch.manual_seed(3)
        self.tiling = CUTS[cut]
        self.count = 5 if self.tiling["decode"] else self.tiling["m"] + 3
        self.kind = kind
        self.x, self.w = rows(self.count, K, K, kind), weight((N, K), kind, bits, 64 if bits else 0)
        self.residual = torch.randn(self.count, N)
        sizes = [end - begin for begin, end in zip((0, *ENDS), ENDS, strict=False)]
        self.low = torch.randn(self.count, rank * len(ENDS)).to(self.x.dtype)  # all ranges beside each other
        self.up = [torch.randn(SLOTS, size, rank).to(self.x.dtype) / 8 for size in sizes]
        self.shift = [torch.randn(SLOTS, size) for size in sizes]
        self.slots = torch.tensor([(2, -1, 0, 1, SLOTS)[row % 5] for row in range(self.count)], dtype=torch.int32)
        types = (kind, self.w.kind, "", "f32", "f32")
        inputs = (Columns(0, 1), Extra(1), AdapterChange(ENDS, rank, SLOTS))
        body = Body.parse("t0 = add a0 a1; t1 = add t0 a2")
        step: Any = make_step("linear_q" if bits else "linear", types, k=K, n=N, **self.w.params,
                              epilogue=Epilogue(body, inputs[:2], N))  # fmt: skip
        stride = rank * len(ENDS)
        self.step = msgspec.structs.replace(
            step,
            epilogue=Epilogue(body, inputs, N),
            low=tuple(BufferOperand("low", kind, stride, rank * i) for i in range(len(ENDS))),
            up=tuple(WeightOperand(f"up{i}", kind) for i in range(len(ENDS))),
            shift=tuple(WeightOperand(f"shift{i}", "f32") for i in range(len(ENDS))),
            slot=BufferOperand("slot", "i32", 1),
        )
        self.rank = rank

    def run(self, slots: Tensor) -> Tensor:
        y = torch.full((self.count, N), torch.nan)
        more = {f"low.{i}": self.low.flatten()[self.rank * i :].contiguous() for i in range(len(ENDS))}
        more |= {f"{name}.{i}": v for name, vs in (("up", self.up), ("shift", self.shift)) for i, v in enumerate(vs)}
        more["slot"] = slots
        shape = Shape(self.count, bool(self.tiling["decode"]))
        inputs = [self.x, self.w.packed, None, self.residual]
        run_kernel(kernel_of(self.step), inputs, [y], shape=shape, more=more, tuner=Forced(self.tiling))
        return y

    def expected(self) -> Tensor:
        y = self.x.double() @ self.w.values.T + self.residual
        for row, slot in enumerate(self.slots.tolist()):
            for i, (begin, end) in enumerate(zip((0, *ENDS), ENDS, strict=False)):
                if 0 <= slot < SLOTS:
                    low = self.low[row, self.rank * i : self.rank * (i + 1)].double()
                    y[row, begin:end] += self.up[i][slot].double() @ low + self.shift[i][slot]
        return y


@pytest.mark.parametrize(("cut", "bits"), [(cut, 0) for cut in CUTS] + [("few rows", 4), ("a tile", 4)])
def test_every_cut_adds_the_change_of_each_row(cut: str, bits: int) -> None:
    adapted = Adapted(cut, bits)
    found = adapted.run(adapted.slots)
    check(found, adapted.expected(), "f32")
    for kept in (0, 1):  # a row's bits do not depend on the other rows' slots
        alone = torch.where(torch.arange(adapted.count) == kept, adapted.slots, -1).to(torch.int32)
        assert torch.equal(adapted.run(alone)[kept], found[kept])


def test_rows_in_float32() -> None:
    adapted = Adapted("a tile", 0, "f32", rank=16)
    check(adapted.run(adapted.slots), adapted.expected(), "f32")
