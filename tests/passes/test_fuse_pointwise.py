"""fuse-pointwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graph_tracing import Value, apply, aten, trace
from icc.compiler.ops.aten import ARITHMETIC, POINTWISE
from icc.passes.fuse.fuse_pointwise import MAX_INPUTS, FusePointwise

convert = torch.ops.prims.convert_element_type.default


def test_broadcast_producers_stay() -> None:
    """One value per row would be computed once per column."""

    def fn(x: Value, y: Value) -> Value:
        return x * aten.sigmoid.default(y)

    done = apply(FusePointwise(), trace(fn, x="f32[T, 8]", y="f32[T, 1]"))
    assert done.counts == {"kernels": 2, "fused-ops": 2}


def test_repeated_work_is_shared() -> None:
    def fn(x: Value) -> Value:
        return aten.exp.default(x) + aten.exp.default(x)

    done = apply(FusePointwise(), trace(fn, x="f32[T, 8]"))
    assert 't0 = exp a0; t1 = add t0 t0"' in done.text


def test_small_powers_are_products() -> None:
    done = apply(FusePointwise(), trace(lambda x: aten.pow.Tensor_Scalar(x, 3) * 0.044715, x="f32[T, 8]"))
    assert '"t0 = mul a0 a0; t1 = mul t0 a0; t2 = mul t1 0.044715"' in done.text


def test_inputs_are_bounded() -> None:
    """Twelve weights in one sum do not fit one kernel."""

    def fn(x: Value, **weights: Value) -> Value:
        for w in weights.values():
            x = x + w
        return x

    done = apply(FusePointwise(), trace(fn, x="f32[T, 8]", **{f"w{i}": "f32[8]" for i in range(12)}))
    inputs = [len(n.args[0]) for n in done.graph.nodes if "pointwise" in str(n.target)]
    assert len(inputs) == 2 and max(inputs) <= MAX_INPUTS


# op without overload -> a use of it; x is any, p positive, both [T, 8]
USES: dict[str, Callable[[Value, Value], Value]] = {
    "aten.add": lambda x, p: aten.add.Tensor(x, p),
    "aten.sub": lambda x, p: aten.sub.Tensor(x, 2),
    "aten.div": lambda x, p: aten.div.Tensor(x, p),
    "aten.mul": lambda x, p: aten.mul.Tensor(x, 3),
    "aten.maximum": lambda x, p: aten.maximum.default(x, p),
    "aten.minimum": lambda x, p: aten.minimum.default(x, p),
    "aten.where": lambda x, p: aten.where.self(aten.gt.Scalar(x, 0.0), p, x),
    "aten.remainder": lambda x, p: aten.remainder.Scalar(x, 0.75),
    "aten.floor_divide": lambda x, p: aten.floor_divide.default(x, p),
    "aten.pow": lambda x, p: aten.pow.Tensor_Scalar(p, 0.3) + aten.pow.Tensor_Scalar(p, 0.5) + aten.pow.Scalar(2, x),
    "aten.clamp": lambda x, p: aten.clamp.default(x, -0.5, 1) + aten.clamp.default(x, None, 0.25),
    "aten.clamp_min": lambda x, p: aten.clamp_min.default(x, 0.1),
    "aten.clamp_max": lambda x, p: aten.clamp_max.default(x, 0.1),
    "aten.hardtanh": lambda x, p: aten.hardtanh.default(x, -0.5, 0.75) + aten.hardtanh.default(x),
    "aten.softplus": lambda x, p: (
        aten.softplus.default(x) + aten.softplus.default(x, 2.0) + aten.softplus.default(x, 3)
    ),
    "aten.leaky_relu": lambda x, p: aten.leaky_relu.default(x, 0.2) + aten.leaky_relu.default(x),
    "aten.elu": lambda x, p: aten.elu.default(x) + aten.elu.default(x, 1.6, 1.05, 0.5),
    "aten.rsub": lambda x, p: aten.rsub.Scalar(x, 1),
    "aten.masked_fill": lambda x, p: aten.masked_fill.Scalar(x, aten.lt.Scalar(x, 0.0), -7.0),
    "aten.addcmul": lambda x, p: aten.addcmul.default(x, p, p),
    "aten.lerp": lambda x, p: aten.lerp.Scalar(x, p, 0.3),
    "aten.log_sigmoid": lambda x, p: aten.log_sigmoid.default(x),
    **{f"aten.{n}": lambda x, p, n=n: _compare(x, p, n) for n in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"aten.{n}": lambda x, p, n=n: _logic(x, p, n) for n in ("logical_and", "logical_or")},
    **{f"aten.{n}": lambda x, p, n=n: _logic(x, p, n, "Tensor") for n in ("bitwise_and", "bitwise_or")},
    **{f"aten.{n}": lambda x, p, n=n: _not(x, n) for n in ("logical_not", "bitwise_not")},
}
POSITIVE = ("log", "log1p", "sqrt", "rsqrt", "reciprocal")


def _compare(x: Value, p: Value, name: str) -> Value:
    packet = getattr(aten, name)
    return convert(packet.Tensor(x, p), torch.float32) + convert(packet.Scalar(x, 0), torch.float32)


def _logic(x: Value, p: Value, name: str, overload: str = "default") -> Value:
    call = getattr(getattr(aten, name), overload)
    return convert(call(aten.gt.Scalar(x, 0.0), aten.lt.Scalar(p, 1.0)), torch.float32)


def _not(x: Value, name: str) -> Value:
    return convert(getattr(aten, name).default(aten.gt.Scalar(x, 0.0)), torch.float32)


@pytest.mark.parametrize("name", sorted({*POINTWISE, *ARITHMETIC}))
def test_every_op_that_the_fusion_knows(name: str) -> None:
    short = name.removeprefix("aten.")
    unary = getattr(aten, short).default if name not in USES else None
    use = USES.get(name) or (lambda x, p: unary(p if short in POSITIVE else x))
    inputs = {"x": torch.linspace(-3, 3, 128).view(16, 8), "p": torch.linspace(0.1, 3, 128).view(16, 8)}

    def fn(token_ids: Value, x: Value, p: Value) -> Value:
        rows = [torch.ops.icc.embedding.default(token_ids, t) for t in (x, p)]
        return use(*rows) * 1.0

    done = apply(FusePointwise(), trace(fn, token_ids="", **inputs))
    assert done.counts["kernels"] == 1


def test_conversions() -> None:
    def fn(x: Value) -> Value:
        whole = convert(x * 3.0, torch.int64)
        return convert(convert(whole, torch.bool), torch.float32) + convert(whole, torch.float32) * 0.5

    assert apply(FusePointwise(), trace(fn, x="f32[T, 8]")).counts == {"kernels": 1, "fused-ops": 7}
