"""recognize-norms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
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
    """The norm with its scale is recognised; the residual addition is left to fuse-add-norm."""
    graph = trace(LAYER_FORMS["scale and shift"], x="f32[T, 8]", w="f32[8]", b="f32[T, 8]")
    run_passes(graph, [EliminateCommon()], PassContext())
    done = apply(RecognizeNorms(), graph)
    assert "the shift is not a constant vector over the last axis" in done.reasons
    assert done.counts == {"layer-norm": 1, "scaled-layer-norm": 1}


def test_not_a_norm() -> None:
    """The root mean square is that of another value."""

    def fn(x: Value, y: Value) -> Value:
        return x * rsqrt(mean(y * y) + EPS)

    assert apply(RecognizeNorms(), trace(fn, x="f32[T, 8]", y="f32[T, 8]")).counts == {}
