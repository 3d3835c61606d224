"""Lowering of the ops with a recurrent state."""

from __future__ import annotations

from torch import fx

from ...runtime.format.kv import KVLayer
from ..graph.tensor_types import type_of
from ..ops import OPS
from .context import Lowerer, row_kind
from .placed import Placed
from .steps.state import CausalConv, ChannelScan, GatedScan, SelectiveScan, StateStep


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
    return _with_state(low, node, step, out)


def gated_scan(low: Lowerer, node: fx.Node) -> Placed:
    """A matrix per head as the state."""
    q, k, v, decay = (low.dense(low.placed(n)) for n in node.args[:4])
    beta = None if node.args[4] is None else low.dense(low.placed(node.args[4]))
    layer = low.kv_layer(int(node.args[6]))  # type: ignore[call-overload]
    out = low.new(node)
    step = GatedScan(
        rows=row_kind(out), layer=layer, q=q.operand, k=k.operand, v=v.operand, decay=decay.operand,
        beta=beta and beta.operand, o=out.operand, heads=v.shape[0], shared=k.shape[0], key_dim=k.shape[1],
        value_dim=v.shape[1], row_decay=len(decay.shape) == 2, delta=bool(node.args[5]),
        block_size=low.options.block_size, chunk=low.options.profile.state_chunk, rounded=_rounded(low),
    )  # fmt: skip
    return _with_state(low, node, step, out)


def selective_scan(low: Lowerer, node: fx.Node) -> Placed:
    """A vector per channel as the state."""
    x, dt, b, c = (low.dense(low.placed(node.args[i])) for i in (0, 1, 3, 4))
    states, channels = type_of(node.args[2]).shape  # type: ignore[arg-type]
    layer = low.kv_layer(int(node.args[5]))  # type: ignore[call-overload]
    a = low.plain(node.args[2])
    out = low.new(node)
    step = SelectiveScan(
        rows=row_kind(out), layer=layer, x=x.operand, dt=dt.operand, a=a, b=b.operand, c=c.operand, y=out.operand,
        channels=channels, states=states, block_size=low.options.block_size, rounded=_rounded(low),
    )  # fmt: skip
    return _with_state(low, node, step, out)


def channel_scan(low: Lowerer, node: fx.Node) -> Placed:
    """A number per channel as the state."""
    x = low.dense(low.placed(node.args[0]))
    decay = None if node.args[1] is None else low.dense(low.placed(node.args[1]))
    layer = low.kv_layer(int(node.args[4]))  # type: ignore[call-overload]
    out = low.new(node)
    step = ChannelScan(
        rows=row_kind(out), layer=layer, x=x.operand, decay=decay and decay.operand, y=out.operand,
        channels=x.shape[0], maximum=bool(node.args[2]), start=float(node.args[3]),  # type: ignore[arg-type]
        block_size=low.options.block_size,
    )  # fmt: skip
    return _with_state(low, node, step, out)


_FUNCTIONS = {
    "causal_conv": causal_conv, "channel_scan": channel_scan, "gated_scan": gated_scan,
    "selective_scan": selective_scan,
}  # fmt: skip
STATE_LOWERING = {OPS[name].overload: fn for name, fn in _FUNCTIONS.items()}


def _rounded(low: Lowerer) -> bool:
    return low.options.state_dtype == "bf16"


def _with_state(low: Lowerer, node: fx.Node, step: StateStep, out: Placed) -> Placed:
    low.cache(step.layer, KVLayer(state=step.state), low.options.state_dtype, 0)
    low.emit(step, node)
    return out
