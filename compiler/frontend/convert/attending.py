"""Converts attention that calls transformers' interface, and emits the op that any attention becomes."""

from __future__ import annotations

from typing import Any

from torch import fx

from ...graph.tensor_types import type_of
from ...ops import OPS, AttentionSpec
from .conversion import Conversion
from .index_scores import IndexScores
from .masks import Mask, with_bias
from .row_bias import AttentionRowBias, PairBias, row_biases
from .values import T, TracedValue, dims_of, op_name


def emit_attention(
    conv: Conversion,
    heads: tuple[fx.Node, fx.Node, fx.Node],
    sinks: fx.Node | None,
    numbers: tuple[float, float],
    mask: Mask,
    added: PairBias | AttentionRowBias | None,
) -> TracedValue:
    """Emit icc::attention of q [T, Hq, D], k [T, Hkv, D] and v [T, Hkv, Dv] -> [1, T, Hq, Dv].

    sinks: [Hq] or None. numbers: the scale of the scores and their soft cap, 0 for no cap. added: a bias of the scores;
    None for no bias.
    """
    scale, softcap = numbers
    slopes = conv.constant("alibi_slopes", mask.slopes).node if mask.slopes is not None else None
    found: tuple[AttentionRowBias | None, ...] = (added, None) if isinstance(added, AttentionRowBias) else (None, None)
    if isinstance(added, PairBias):
        found = row_biases(conv, added, mask)
    bias = conv.constant("distance_bias", mask.bias).node if mask.bias is not None else None
    of_rows, of_keys = (rows and rows.rows.node for rows in found)
    later, key_later = (rows.later if rows else 0 for rows in found)
    q, k, v = heads
    spec = AttentionSpec(conv.next_layer(), scale, mask.seen, softcap, later, key_later)
    op = OPS["attention"]
    args = op.ordered(
        q=q, k=k, v=v, spec=spec, sinks=sinks, alibi=slopes, bias=bias, row_bias=of_rows, key_bias=of_keys
    )
    out = conv.emit(op.overload, *args)
    return TracedValue(out, (T, *type_of(out).shape))


class InterfaceAttention:
    """The CallFollower of icc_trace::attention, whose scores may get a bias over pairs of tokens."""

    def __init__(self) -> None:
        self._chosen: dict[tuple[fx.Node, int], AttentionRowBias] = {}  # layers may share an index

    def follow(self, conv: Conversion, node: fx.Node) -> Any:
        """The attention's TracedValue. None for any other node, and if an operand has no token-major form. ValueError
        for a bias that depends on the tokens."""
        if op_name(node.target) != "icc_trace.attention":
            return None
        given: Any = node.args
        q, k, v, sinks = (conv.values.get(a) for a in given[:4])
        if not all(isinstance(value, TracedValue) for value in (q, k, v)):
            return None
        heads = _heads(conv, q), _heads(conv, k), _heads(conv, v)
        scale, window, chunk, softcap, ahead, *rest = given[4:]
        mask, added = Mask(window, chunk, ahead), None
        if rest and rest[0] is not None:
            added = conv.values.get(rest[0])
            if rest[0] in conv.static.nodes:
                mask, added = with_bias(conv.static, conv.max_tokens, rest[0], type_of(heads[0]).shape[0], mask), None
            elif not isinstance(added, PairBias):
                raise ValueError("attention with a bias that depends on the tokens")
        if len(rest) > 1 and rest[1] is not None:
            added = self._choice(conv, rest[1], rest[2], added)
        sink = sinks.node if isinstance(sinks, TracedValue) else None
        if given[3] in conv.static.nodes and given[3].op == "call_function":
            sink = conv.constant("sinks", conv.static.constant(given[3])).node
        out = emit_attention(conv, heads, sink, (scale, softcap), mask, added)
        return conv.view(out, dims_of(node.meta["val"]))

    def _choice(self, conv: Conversion, index: fx.Node, count: int, added: PairBias | None) -> AttentionRowBias:
        scores = conv.values.get(index)
        if not isinstance(scores, IndexScores) or added is not None:
            raise ValueError("an index picks the tokens that attention reads, in a way that is not known")
        if (index, count) not in self._chosen:
            self._chosen[index, count] = scores.chosen(conv, count)
        return self._chosen[index, count]


def _heads(conv: Conversion, value: Any) -> fx.Node:
    """A node [T, H, D] for a value that models hold as [1, H, T, D]."""
    if value.dims[0] != 1 or value.dims[2] is not T:
        raise ValueError(f"attention over a tensor of dims {value.dims}")
    return conv.view(value, (value.dims[1], T, value.dims[3])).node
