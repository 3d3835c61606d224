"""Writes elementwise ops: any op that declares a body, and bodies themselves."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..graph.tensor_types import TensorType, type_of
from ..ops.body import Argument, Body, BodyWriter
from .pointwise import Typed, emit_body
from .writer import Table, Writer

HANDLERS = Table()


def _typed(w: Writer, arg: fx.Node) -> Typed:
    return Typed(w.value(arg), type_of(arg).meta())


def _finished(w: Writer, found: Typed, wanted: TensorType) -> str:
    """A body's result, converted to the graph's dtype and expanded to its shape."""
    name = found.name if found.meta.dtype == wanted.dtype else w.b.cast(found.name, wanted.dtype)
    if tuple(found.meta.shape) == tuple(wanted.meta().shape):
        return name
    if wanted.rows is not None and (not found.meta.shape or found.meta.dim() < wanted.rank):
        raise ValueError("a body that does not depend on the tokens")
    return w.b.add("Expand", name, w.b.ints(*(1 if s == -1 else s for s in wanted.full_shape)))


def of_body(w: Writer, node: fx.Node, instructions: Any) -> str:
    """Write an op that declares its computation per element."""
    write, inputs = BodyWriter(), []
    floats = any(type_of(n).dtype.is_floating_point for n in node.all_input_nodes)

    def operand(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            if arg not in inputs:
                inputs.append(arg)
            return Argument(inputs.index(arg))
        return float(arg) if floats and type(arg) is int else arg

    body = write.finish(instructions(write, *(operand(a) for a in node.args)))
    return _finished(w, emit_body(w.b, body, [_typed(w, n) for n in inputs]), type_of(node))


@HANDLERS.handles("pointwise")
def _pointwise(w: Writer, node: fx.Node) -> str:
    inputs, text = node.args
    found = emit_body(w.b, Body.parse(str(text)), [_typed(w, n) for n in inputs])  # type: ignore[union-attr]
    return _finished(w, found, type_of(node))
