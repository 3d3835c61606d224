"""simplify."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graph_tracing import Value, apply, aten, cat, trace
from icc.passes.canonicalize.simplify import Simplify

convert = torch.ops.prims.convert_element_type.default


def test_slices_of_slices() -> None:
    def fn(x: Value) -> Value:
        return x.slice(1, 4, 14).slice(1, 2, 8, 2) + 1.0

    assert apply(Simplify(merge_slices=True), trace(fn, x="f32[T, 16]")).counts == {"slice-of-slice": 1}
    assert apply(Simplify(), trace(fn, x="f32[T, 16]")).counts == {}


NO_OPS: dict[str, Callable[[Value], Value]] = {
    "view": lambda x: x.view(-1, 2, 8),
    "expand": lambda x: aten.expand.default(x, [-1, 2, 8]),
    "slice": lambda x: x.slice(2, 0, 8),
    "repeat": lambda x: aten.repeat.default(x, [1, 1, 1]),
    "cat": lambda x: cat([x], 1),
    "convert": lambda x: convert(x, torch.float32),
}


@pytest.mark.parametrize("name", NO_OPS)
def test_no_ops_vanish(name: str) -> None:
    done = apply(Simplify(), trace(lambda x: NO_OPS[name](aten.exp.default(x)), x="f32[T, 2, 8]"))
    assert done.ops == ["icc::embedding", "aten::exp", "aten::view"] and done.counts == {"no-op": 1}


KEPT: dict[str, Callable[[Value], Value]] = {
    "slice with a step": lambda x: x.slice(1, 0, 8, 2),
    "division that is not exact": lambda x: x / 3.0,
    "division by zero": lambda x: x * 0.0 / 4.5,
    "product that converts": lambda x: aten.gt.Scalar(x, 0.0) * 1,
    "integer division": lambda x: aten.div.Tensor(convert(x, torch.int64), 2),
    "pow 3": lambda x: aten.pow.Tensor_Scalar(x, 3),
    "one minus": lambda x: x - 1,
    "sum of a scaled value": lambda x: x + 0.5,
}


@pytest.mark.parametrize("name", KEPT)
def test_refused(name: str) -> None:
    assert apply(Simplify(), trace(KEPT[name], x="f32[T, 8]")).counts == {}


def test_commuted_neutral_elements() -> None:
    """The frontend writes scalars second, so `1 * x` does not occur."""
    done = apply(Simplify(), trace(lambda x: (x - 0) * 1.0, x="f32[T, 8]"))
    assert done.counts == {"neutral-element": 2}
