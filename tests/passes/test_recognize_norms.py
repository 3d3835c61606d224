"""recognize-norms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from expecttest import assert_expected_inline
from graph_tracing import Value, apply, aten, icc, mean, trace
from icc.passes.base import PassContext
from icc.passes.canonicalize.eliminate_common import EliminateCommon
from icc.passes.canonicalize.fold_constants import FoldConstants
from icc.passes.canonicalize.recognize_norms import RecognizeNorms
from icc.passes.canonicalize.simplify import Simplify
from icc.passes.manager import run_passes

EPS = 1e-5
Norm = Callable[[Value, Value, Value], Value]


def rsqrt(x: Value) -> Value:
    return aten.rsqrt.default(x)


def test_rms_norm_text() -> None:
    def fn(x: Value, w: Value) -> Value:
        return w * (x * rsqrt(mean(x * x) + EPS))

    assert_expected_inline(
        apply(RecognizeNorms(), trace(fn, x="f32[T, 8]", w="f32[8]")).text,
        """\
graph(%token_ids: i64[T]):
  %0: f32[T, 8] = icc.embedding(%token_ids, @x: f32[16, 8])
  %1: f32[T, 8] = aten.mul.Tensor(%0, %0)
  %2: f32[T] = icc.reduce(%1, "mean", 1)
  %3: f32[T, 1] = aten.view(%2, [-1, 1])
  %4: f32[T, 1] = aten.add.Tensor(%3, 1e-05)
  %5: f32[T, 1] = aten.rsqrt(%4)
  %6: f32[T, 8] = aten.mul.Tensor(%0, %5)
  %7: f32[T, 8] = aten.mul.Tensor(@w: f32[8], %6)
  return %7
-- recognize-norms
graph(%token_ids: i64[T]):
  %0: f32[T, 8] = icc.embedding(%token_ids, @x: f32[16, 8])
  %1: f32[T, 8] = icc.rms_norm(%0, @w: f32[8], 1e-05)
  return %1
""",
    )


def test_layer_norm_text() -> None:
    def fn(x: Value, w: Value, b: Value) -> Value:
        c = x - mean(x)
        return c * rsqrt(mean(c * c) + EPS) * w + b

    graph = trace(fn, x="f32[T, 8]", w="f32[8]", b="f32[8]")
    assert_expected_inline(
        apply(RecognizeNorms(), graph).text,
        """\
graph(%token_ids: i64[T]):
  %0: f32[T, 8] = icc.embedding(%token_ids, @x: f32[16, 8])
  %1: f32[T] = icc.reduce(%0, "mean", 1)
  %2: f32[T, 1] = aten.view(%1, [-1, 1])
  %3: f32[T, 8] = aten.sub.Tensor(%0, %2)
  %4: f32[T, 8] = aten.mul.Tensor(%3, %3)
  %5: f32[T] = icc.reduce(%4, "mean", 1)
  %6: f32[T, 1] = aten.view(%5, [-1, 1])
  %7: f32[T, 1] = aten.add.Tensor(%6, 1e-05)
  %8: f32[T, 1] = aten.rsqrt(%7)
  %9: f32[T, 8] = aten.mul.Tensor(%3, %8)
  %10: f32[T, 8] = aten.mul.Tensor(%9, @w: f32[8])
  %11: f32[T, 8] = aten.add.Tensor(%10, @b: f32[8])
  return %11
-- recognize-norms
graph(%token_ids: i64[T]):
  %0: f32[T, 8] = icc.embedding(%token_ids, @x: f32[16, 8])
  %1: f32[T, 8] = icc.layer_norm(%0, @w: f32[8], @b: f32[8], 1e-05)
  return %1
""",
    )


RMS_FORMS: dict[str, Norm] = {
    "w * n": lambda x, w, b: w * (x * rsqrt(mean(x * x) + EPS)),
    "n * w": lambda x, w, b: x * rsqrt(mean(x * x) + EPS) * w,
    "reversed product": lambda x, w, b: rsqrt(mean(x * x) + EPS) * x * w,
    "(1 + w) * n": lambda x, w, b: (w + 1.0) * (x * rsqrt(mean(x * x) + EPS)),
    "pow(2)": lambda x, w, b: x * rsqrt(mean(aten.pow.Tensor_Scalar(x, 2)) + EPS) * w,
    "pow(-0.5)": lambda x, w, b: x * aten.pow.Tensor_Scalar(mean(x * x) + EPS, -0.5) * w,
    "x / sqrt": lambda x, w, b: x / aten.sqrt.default(mean(x * x) + EPS) * w,
    "vector with axes of one": lambda x, w, b: x * rsqrt(mean(x * x) + EPS) * w.view(1, 8),
    "eps first": lambda x, w, b: x * rsqrt(aten.add.Tensor(mean(x * x), EPS)) * w,
}
LAYER_FORMS: dict[str, Norm] = {
    "scale and shift": lambda x, w, b: (x - mean(x)) * rsqrt(_variance(x) + EPS) * w + b,
    "shift first": lambda x, w, b: b + w * ((x - mean(x)) * rsqrt(_variance(x) + EPS)),
    "x / sqrt": lambda x, w, b: (x - mean(x)) / aten.sqrt.default(_variance(x) + EPS) * w + b,
    "scale only": lambda x, w, b: (x - mean(x)) * rsqrt(_variance(x) + EPS) * w,
    "neither": lambda x, w, b: (x - mean(x)) * rsqrt(_variance(x) + EPS),
    "pow(2)": lambda x, w, b: (x - mean(x)) * rsqrt(mean(aten.pow.Tensor_Scalar(x - mean(x), 2)) + EPS) * w,
}


def _variance(x: Value) -> Value:
    centred = x - mean(x)
    return mean(centred * centred)


def _canonical(fn: Norm, shape: str, weights: str) -> list[str]:
    graph = trace(fn, x=shape, w=weights, b=weights)
    run_passes(graph, [FoldConstants(), Simplify(), EliminateCommon()], PassContext())
    return [o for o in apply(RecognizeNorms(), graph).ops if o not in ("icc::embedding", "aten::view")]


@pytest.mark.parametrize("shape", ["f32[T, 8]", "f32[T, 1, 8]", "f32[T, 3, 8]"])
@pytest.mark.parametrize("form", RMS_FORMS)
def test_rms_norm_forms(form: str, shape: str) -> None:
    assert _canonical(RMS_FORMS[form], shape, "f32[8]") == ["icc::rms_norm"]


@pytest.mark.parametrize("weights", ["f32[8]", "bf16[8]"])
@pytest.mark.parametrize("form", LAYER_FORMS)
def test_layer_norm_forms(form: str, weights: str) -> None:
    assert _canonical(LAYER_FORMS[form], "f32[T, 1, 8]", weights) == ["icc::layer_norm"]


def test_refuses_a_mean_over_another_axis() -> None:
    def fn(x: Value) -> Value:
        squares = icc.reduce.default(x * x, "mean", 1).view(-1, 1, 8)
        return x * rsqrt(squares + EPS)

    done = apply(RecognizeNorms(), trace(fn, x="f32[T, 3, 8]"))
    assert done.counts == {} and done.reasons == ["the mean is not over the last axis"]


def test_refuses_a_scale_that_differs_between_tokens() -> None:
    def fn(x: Value, gate: Value) -> Value:
        return x * rsqrt(mean(x * x) + EPS) * gate

    done = apply(RecognizeNorms(), trace(fn, x="f32[T, 8]", gate="f32[T, 8]"))
    assert done.counts == {"rms-norm": 1}
    assert done.reasons == ["the scale is not a constant vector over the last axis"]


def test_refuses_a_scale_that_differs_between_heads() -> None:
    done = apply(RecognizeNorms(), trace(RMS_FORMS["n * w"], x="f32[T, 3, 8]", w="f32[3, 8]", b="f32[8]"))
    assert done.counts == {"rms-norm": 1}
    assert done.reasons == ["the scale is not a constant vector over the last axis"]


def test_refuses_a_shift_that_is_a_token_value() -> None:
    """Its scale is taken; the residual addition is left to fuse-add-norm."""
    graph = trace(LAYER_FORMS["scale and shift"], x="f32[T, 8]", w="f32[8]", b="f32[T, 8]")
    run_passes(graph, [EliminateCommon()], PassContext())
    done = apply(RecognizeNorms(), graph)
    assert "the shift is not a constant vector over the last axis" in done.reasons
    assert done.counts == {"layer-norm": 1, "scaled-layer-norm": 1}


def test_not_a_norm() -> None:
    """The root of another value's mean square."""

    def fn(x: Value, y: Value) -> Value:
        return x * rsqrt(mean(y * y) + EPS)

    assert apply(RecognizeNorms(), trace(fn, x="f32[T, 8]", y="f32[T, 8]")).counts == {}
