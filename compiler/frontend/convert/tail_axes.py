"""Exported calls whose result does not depend on the number of leading axes."""

from __future__ import annotations

from typing import Any

from torch import fx

from ...ops.aten import ARITHMETIC, POINTWISE
from .values import op_name

_ANY = {
    *POINTWISE, *ARITHMETIC, "aten.gelu", "aten.alias", "aten.clone", "aten.detach", "aten.contiguous", "aten.dropout",
    "aten._to_copy", "prims.convert_element_type", "aten.to", "aten.view", "aten.reshape", "aten._unsafe_view",
    "aten.rms_norm", "aten._fused_rms_norm", "aten.layer_norm", "aten.native_layer_norm", "aten.linear", "aten.mm",
    "aten.addmm", "aten.sym_size", "getitem",
}  # fmt: skip
_WITH_AXES = {"aten.mean", "aten.sum", "aten.amax", "aten.amin", "aten.var", "aten._softmax", "aten.softmax"}


def counts_from_the_end(node: fx.Node) -> bool:
    """Whether a call treats all axes alike, or only the last ones specially."""
    name = op_name(node.target)
    if name in _WITH_AXES and len(node.args) > 1:
        axes: Any = node.args[1]
        return all(axis < 0 for axis in (axes if isinstance(axes, (list, tuple)) else [axes]))
    return name in _ANY
