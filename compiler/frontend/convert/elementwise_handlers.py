"""Handlers of elementwise ops, type conversions, and ops that return an operand unchanged.

Handlers make exported ops token-major, one small function per op. An op without one is refused by name.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx

from ...graph.tensor_types import type_of
from ...ops import OPS, op_of
from ...ops.aten import POINTWISE
from ...ops.body import Argument, BodyWriter
from .broadcasting import align, expand_to, val_of
from .conversion import Conversion
from .table import DECLARED, Table
from .values import T, TracedValue, dims_of, op_name

aten = torch.ops.aten
HANDLERS = Table()


@HANDLERS.handles(*(name for name in POINTWISE if name != "aten.where"))
def pointwise(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """An elementwise op. ValueError for arithmetic with the number of tokens."""
    dims = dims_of(val_of(node))
    operands = [align(conv, a, dims) if isinstance(a, TracedValue) else a for a in args]
    if any(isinstance(o, torch.SymInt) for o in operands):
        raise ValueError("arithmetic with the number of tokens")
    emitted = conv.emit(_with_kwargs(node.target, kwargs), *operands)
    return TracedValue(emitted, dims)


@HANDLERS.handles(DECLARED)
def declared(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """An elementwise op that another package declared; keyword operands become positional."""
    op = op_of(node.target)
    assert op is not None
    named = {**dict(zip(op.parameters, args, strict=False)), **kwargs}
    return pointwise(conv, node, list(op.ordered(**named)), {})


@HANDLERS.handles("aten.where")
def where(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A choice between two values. A condition that does not depend on the tokens is evaluated here."""
    condition: Any = node.args[0]
    if isinstance(args[0], TracedValue) and T not in args[0].dims and condition in conv.static.nodes:
        with contextlib.suppress(ValueError):
            chosen = conv.static.constant(condition)
            picked = args[1] if bool(chosen.all()) else args[2]
            if isinstance(picked, TracedValue) and bool(chosen.all()) == bool(chosen.any()):
                return expand_to(conv, picked, dims_of(val_of(node)))
    return pointwise(conv, node, args, kwargs)


def _with_kwargs(target: Any, kwargs: dict[str, Any]) -> Any:
    kept = {k: v for k, v in kwargs.items() if k in ("alpha", "approximate", "rounding_mode") and v not in (None, 1)}
    if kept:
        raise ValueError(f"the option {kept}")
    return target


@HANDLERS.handles("aten.gelu")
def gelu(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """gelu, exact or by tanh."""
    approximate = kwargs.get("approximate", args[1] if len(args) > 1 else "none")
    body = "t0 = gelu_tanh a0" if approximate == "tanh" else "t0 = gelu_erf a0"
    return TracedValue(conv.emit(OPS["pointwise"].overload, [args[0].node], body), args[0].dims)


@HANDLERS.handles("aten.div", "aten.add", "aten.sub")
def arithmetic(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """add and sub, also with a factor, and div, also rounded to an integer."""
    mode = kwargs.pop("rounding_mode", None)
    alpha = kwargs.pop("alpha", 1)
    dims = dims_of(val_of(node))
    left, right = (align(conv, a, dims) if isinstance(a, TracedValue) else a for a in args[:2])
    if alpha != 1:
        right = conv.emit(aten.mul.Tensor, right, alpha) if isinstance(right, fx.Node) else right * alpha
    if mode is not None:
        inputs, divisor = ([left, right], Argument(1)) if isinstance(right, fx.Node) else ([left], right)
        write = BodyWriter()
        result = write("floordiv" if mode == "floor" else "div", Argument(0), divisor)
        body = write.finish(result if mode == "floor" else write("trunc", result))
        return TracedValue(conv.emit(OPS["pointwise"].overload, inputs, str(body)), dims)
    base = {"aten.div": aten.div.Tensor, "aten.add": aten.add.Tensor, "aten.sub": aten.sub.Tensor}
    name = op_name(node.target)
    return TracedValue(conv.emit(base[name], left, right), dims)


@HANDLERS.handles(
    "aten.alias",
    "aten.clone",
    "aten.detach",
    "aten.contiguous",
    "aten.dropout",
    "aten.lift_fresh_copy",
    "aten._assert_tensor_metadata",
    "aten._assert_scalar",
    "aten.native_dropout",
)
def identity(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Ops that return their first operand unchanged."""
    return args[0]


@HANDLERS.handles("aten.sym_size", "aten.sym_constrain_range_for_size", "aten.sym_constrain_range", "aten.sym_numel")
def size(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A size; symbolic if it is the number of tokens."""
    return node.meta.get("val")


@HANDLERS.handles("aten._to_copy", "prims.convert_element_type", "aten.to")
def convert(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A conversion to another dtype. Between float dtypes it emits nothing, because all floats are float32 in the
    graph."""
    value: TracedValue = args[0]
    target, source = val_of(node).dtype, type_of(value.node).dtype
    if target == source or (target.is_floating_point and source.is_floating_point):
        return value  # all floats compute in float32
    dtype = torch.float32 if target.is_floating_point else target
    return TracedValue(conv.emit(torch.ops.prims.convert_element_type.default, value.node, dtype), value.dims)


@HANDLERS.handles("getitem")
def getitem(conv: Conversion, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One of the results of a call that has several."""
    return args[0][args[1]]
