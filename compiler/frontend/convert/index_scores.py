"""Scores of a sparse-attention indexer, which selects the tokens that attention reads: w relu(q k^T) summed over heads,
recognised by data flow.

A product of queries [T, H, D], one matrix per token, with one key of every token becomes an `IndexScores`. A positive
factor is dropped, because it does not change which keys are best. The attention that uses the scores emits the
selection, once for all layers that share it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ...ops import OPS
from .conversion import Conversion
from .row_bias import AttentionRowBias, pair_dims
from .values import KeyPairs, T, TracedValue, op_name

_SAME = ("clone", "alias", "detach", "contiguous", "_to_copy", "to", "convert_element_type", "expand")
_RESHAPES = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze")


@dataclass(frozen=True)
class IndexKeys:
    """Keys [.., D, T], which the queries of every token are multiplied with."""

    k: TracedValue


@dataclass(frozen=True)
class IndexScores:
    """Scores of an indexer while the model computes them.

    First the products of q (T, H, D) and the keys, (H, T) per token; then, with `relu`, their positive parts; then
    their sum over heads, weighted by w (T, H).
    """

    q: TracedValue
    k: TracedValue
    relu: bool = False
    w: TracedValue | None = None

    def chosen(self, conv: Conversion, count: int) -> AttentionRowBias:
        """The bias of attention scores, shared by all heads, that leaves only the `count` best keys of each query.
        ValueError if the indexer's scores are not a sum over heads."""
        if self.w is None:
            raise ValueError("an index that is no sum over heads")
        heads, dim = self.q.dims[-2:]
        q, k, w = (conv.view(x, dims).node for x, dims in self._operands(self.w, heads, dim))
        width = conv.max_tokens
        rows = conv.emit(OPS["choose_keys"].overload, q, k, w, conv.next_layer(), count, width)
        return AttentionRowBias(TracedValue(rows, (1, T, width)), 0)

    def _operands(self, w: TracedValue, heads: int, dim: int) -> tuple[tuple[TracedValue, tuple[Any, ...]], ...]:
        return (self.q, (T, heads, dim)), (self.k, (T, 1, dim)), (w, (T, heads))

    @property
    def dims(self) -> tuple[Any, ...]:
        """The dims of the scores, without axes of size 1."""
        heads = self.q.dims[-2]
        return (T, heads, T) if self.w is None and heads > 1 else (T, T)


class PickingIndex:
    """The CallFollower of an indexer's scores, up to the attention that uses them."""

    def follow(self, conv: Conversion, node: fx.Node) -> Any:
        """The value that a node of an indexer becomes; None for any other node. ValueError for an indexer of another
        kind."""
        short = op_name(node.target).split(".")[-1]
        inputs: list[Any] = [conv.values.get(a) if isinstance(a, fx.Node) else None for a in node.args]
        if short in _RESHAPES and isinstance(inputs[0], KeyPairs) and _are_keys(inputs[0].value, node):
            return IndexKeys(inputs[0].value)
        if short == "bmm" and isinstance(inputs[1], IndexKeys):
            q = inputs[0]
            return (
                IndexScores(q, inputs[1].k) if isinstance(q, TracedValue) and q.axis == 0 and len(q.dims) == 3 else None
            )
        scores = next((v for a in node.all_input_nodes if isinstance(v := conv.values.get(a), IndexScores)), None)
        if scores is None or op_name(node.target) == "icc_trace.attention":
            return None
        return _followed(conv, node, short, scores)


def _are_keys(k: TracedValue, node: fx.Node) -> bool:
    """Whether a view of repeated keys is one matrix of keys (D, T) per token."""
    dims = pair_dims(node.meta["val"])
    return len(dims) == 3 and dims == (T, k.dims[-2], T) and len(k.features) == k.features.count(1) + 1


def _followed(conv: Conversion, node: fx.Node, short: str, scores: IndexScores) -> IndexScores:
    found = scores
    if short == "relu" and scores.w is None:
        found = replace(scores, relu=True)
    elif short == "bmm" and scores.relu and scores.w is None:
        w: Any = conv.values.get(node.args[0])  # type: ignore[arg-type]
        if not isinstance(w, TracedValue) or w.dims != (T, 1, scores.q.dims[-2]):
            raise ValueError("an index that weighs its heads by something other than a number per token")
        found = replace(scores, w=w)
    elif short in ("mul", "div"):
        factor = node.args[1]
        if not isinstance(factor, (int, float)) or factor <= 0:
            raise ValueError("an index times something other than a positive number")
    elif short not in _SAME and short not in _RESHAPES:
        raise ValueError(f"{short} of an index's scores")
    if tuple(d for d in pair_dims(node.meta["val"]) if d != 1) != found.dims:
        raise ValueError("scores of an index in another order")
    return found
