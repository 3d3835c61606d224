"""Writes each op of the dialect in ONNX: one small function per op. An op without one is refused by name."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..errors import ExportError
from ..graph.printer import target_name
from ..handlers import joined
from ..ops import op_of
from . import attention_ops, elementwise_ops, product_ops, reduce_ops, scan_ops, shape_ops
from .writer import Writer

_PARTS = (shape_ops, elementwise_ops, product_ops, reduce_ops, attention_ops, scan_ops)
HANDLERS = joined(*(part.HANDLERS for part in _PARTS))


def write_call(w: Writer, node: fx.Node) -> None:
    """Write one call. ExportError if it cannot be written in ONNX."""
    module = str(node.meta.get("module", ""))
    name = target_name(node.target)
    with w.b.at(module):
        try:
            w.values[node] = _written(w, node, name)
        except ValueError as error:
            where = f" in module {module!r}" if module else ""
            raise ExportError(f"{name}{where} cannot be written in ONNX: {error}") from error


def _written(w: Writer, node: fx.Node, name: str) -> Any:
    declared = op_of(node.target)
    if (handler := HANDLERS.get(name if declared is None else declared.name)) is not None:
        return handler(w, node)
    if declared is None or declared.instructions is None:
        raise ValueError("there is no translation of the op")
    return elementwise_ops.of_body(w, node, declared.instructions)
