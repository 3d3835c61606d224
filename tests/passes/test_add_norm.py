"""fuse-add-norm."""

from __future__ import annotations

import pytest
from graph_tracing import Value, apply, aten, icc, trace
from icc.passes.fuse.add_norm import FuseAddNorm

rms = icc.rms_norm.default


def test_residual_and_layer_norm() -> None:
    def fn(x: Value, r: Value, w: Value, b: Value) -> Value:
        return icc.layer_norm.default(x + r, w, b, 1e-5)

    done = apply(FuseAddNorm(), trace(fn, x="f32[T, 3, 8]", r="f32[T, 3, 8]", w="f32[8]", b="f32[8]"))
    assert done.counts == {"fused": 1} and "icc::add_layer_norm" in done.ops


def test_two_norms_of_one_sum() -> None:
    """GPT-NeoX: attention and MLP have separate norms. The first is fused with the sum, the second reads its result."""

    def fn(x: Value, r: Value, a: Value, b: Value) -> Value:
        total = x + r
        return rms(total, a, 1e-5) * rms(total, b, 1e-5)

    done = apply(FuseAddNorm(), trace(fn, x="f32[T, 8]", r="f32[T, 8]", a="f32[8]", b="f32[8]"))
    assert done.counts == {"fused": 1} and done.reasons == ["the norm does not read a sum"]


def test_the_sum_is_read_before_the_norm() -> None:
    def fn(x: Value, r: Value, w: Value) -> Value:
        total = x + r
        early = aten.exp.default(total)
        return rms(total, w, 1e-5) * early

    assert apply(FuseAddNorm(), trace(fn, x="f32[T, 8]", r="f32[T, 8]", w="f32[8]")).counts == {"fused": 1}


REFUSED = {
    "the norm does not read a sum": lambda x, r, w: rms(x * r, w, 1e-5),
    "the sum is with a constant": lambda x, r, w: rms(x + w, w, 1e-5),
    "the sum broadcasts": lambda x, r, w: rms(x + r.slice(1, 0, 1), w, 1e-5),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason: str) -> None:
    done = apply(FuseAddNorm(), trace(REFUSED[reason], x="f32[T, 8]", r="f32[T, 8]", w="f32[8]"))
    assert done.counts == {} and done.reasons == [reason]


def test_refuses_a_sum_with_a_number() -> None:
    done = apply(FuseAddNorm(), trace(lambda x, w: rms(x + 1.0, w, 1e-5), x="f32[T, 8]", w="f32[8]"))
    assert done.counts == {} and done.reasons == ["the sum is with a constant"]


def test_refuses_a_scale_that_tokens_determine() -> None:
    def fn(x: Value, r: Value, w: Value) -> Value:
        scale = icc.reduce.default(aten.exp.default(x).view(-1, 8, 1), "sum", 1)
        return icc.rms_norm.default(x + r, scale, 1e-5)

    done = apply(FuseAddNorm(), trace(fn, x="f32[T, 8]", r="f32[T, 8]", w="f32[8]"))
    assert done.counts == {} and done.reasons == ["the scale is not a constant"]
