"""Lowering of the ops with a recurrent state."""

from __future__ import annotations

from torch import fx

from ...runtime.format.kv import KVLayer
from ..graph.graph import type_of
from ..ops import OPS
from .context import Lowerer, row_kind
from .placed import Placed
from .steps.state import CausalConv


def causal_conv(low: Lowerer, node: fx.Node) -> Placed:
    """The convolution, with the last inputs as its state."""
    x = low.dense(low.placed(node.args[0]))
    taps, channels = type_of(node.args[1]).shape  # type: ignore[arg-type]
    layer = low.kv_layer(int(node.args[3]))  # type: ignore[call-overload]
    weight, bias = low.plain(node.args[1]), low.vector(node.args[2])
    out = low.new(node)
    step = CausalConv(
        rows=row_kind(out), layer=layer, x=x.operand, w=weight, bias=bias, y=out.operand, channels=channels, taps=taps,
        block_size=low.options.block_size,
    )  # fmt: skip
    low.cache(layer, KVLayer(state=step.state), 0)
    low.emit(step, node)
    return out


_FUNCTIONS = {"causal_conv": causal_conv}
STATE_LOWERING = {OPS[name].overload: fn for name, fn in _FUNCTIONS.items()}
