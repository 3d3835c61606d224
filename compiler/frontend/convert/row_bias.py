"""Biases of attention scores by distance that depend on the query or the key: columns of a row, laid out over pairs of
tokens.

Models pick, for each pair of a query and a key, one number of the query's row, or of the key's: by a gather (Inkling's
profiles of distances, ProphetNet's buckets, DeBERTa's c2p and p2c), or by shifting rows against each other
(Transformer-XL, XLNet). Their operations are run on the column numbers of a short sequence, and the result is compared
with the distances; the attention op then reads the rows directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from ...ops import OPS
from .conversion import Conversion
from .masks import SMALL_TABLE, Mask
from .values import T, TracedValue, op_name

_MOVES = (
    "clone", "alias", "detach", "contiguous", "_to_copy", "to", "convert_element_type", "expand", "view", "reshape",
    "_unsafe_view", "unsqueeze", "squeeze", "slice", "select", "index_select", "permute", "transpose", "gather",
    "repeat",
)  # fmt: skip
aten = torch.ops.aten
_LENGTHS = (7, 12)  # lengths in tokens of the sequences whose tables are compared
NOTHING, UNSEEN = -1, -2  # in place of a column number: nothing is added, or the key is not visible
_MASKS = ("masked_fill", "where")
_ARITHMETIC = ("mul", "div", "add")  # applied to the rows themselves


def pair_dims(val: Any) -> tuple[Any, ...]:
    """Dims as `dims_of` returns them, but two token axes are allowed."""
    return tuple(T if isinstance(s, torch.SymInt) and not s.node.expr.is_Integer else int(s) for s in val.shape)


@dataclass(frozen=True)
class PairRows:
    """rows (H, T, C), laid out over pairs of tokens. trail: nodes of the program that lay them out, the first of which
    takes `source`. numbers: for a number of tokens, a tensor [.., tokens, n] in the shape of `source` that holds 1 + an
    element's flat index in `rows`.
    """

    rows: TracedValue
    source: fx.Node
    numbers: Callable[[int], Tensor]
    trail: tuple[fx.Node, ...] = ()
    grows: bool = False  # the width of rows depends on the longest sequence
    by_query: bool = False  # rows were multiplied by a number per query


@dataclass(frozen=True)
class PairBias:
    """A sum of PairRows."""

    parts: tuple[PairRows, ...]

    def times(self, conv: Conversion, factor: Any) -> PairBias:
        """The sum times a number, or times a node with a number per query."""
        per_query = isinstance(factor, fx.Node)
        scaled = (replace(p, rows=_scaled(conv, p.rows, factor), by_query=p.by_query or per_query) for p in self.parts)
        return PairBias(tuple(scaled))

    def through(self, node: fx.Node) -> PairBias:
        """The sum, laid out by one more node."""
        return PairBias(tuple(replace(part, trail=(*part.trail, node)) for part in self.parts))


@dataclass(frozen=True)
class AttentionRowBias:
    """The operand of `icc::attention`: rows (H, T, E), whose column `later` + query - key is added to a score."""

    rows: TracedValue
    later: int
    of_keys: bool = False


class BiasByRows:
    """The CallFollower of gather(rows[.., T, C], index[.., T, T]) and similar ops, up to the attention that adds the
    result."""

    def follow(self, conv: Conversion, node: fx.Node) -> Any:
        """The PairBias of a node; None if the node is not part of one. ValueError says why a bias is refused."""
        short = op_name(node.target).split(".")[-1]
        if short == "gather":
            return _gathered(conv, node)
        if short in ("bmm", "matmul"):
            return _of_distances(conv, node)
        at = [i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and isinstance(conv.values.get(a), PairBias)]
        if len(at) == 2 and short == "add" and not node.kwargs:
            return PairBias(tuple(part for i in at for part in conv.values[node.args[i]].through(node).parts))  # type: ignore[index]
        if len(at) != 1 or short not in (*_MOVES, *_MASKS, *_ARITHMETIC):
            return None
        bias: PairBias = conv.values[node.args[at[0]]]  # type: ignore[index]
        others = [a for i, a in enumerate(node.args) if i != at[0]]
        if short == "add":
            return bias.through(node) if others == [0] else None
        if short in ("mul", "div"):
            return _multiplied(conv, bias, others[0], short == "div", at[0]).through(node)
        if any(n not in conv.static.nodes for n in node.all_input_nodes if n is not node.args[at[0]]):
            raise ValueError("a bias of the attention scores that depends on two tokens")
        if short in _MASKS:
            fill = others[-1]
            filled = conv.static.evaluate(fill, SMALL_TABLE) if isinstance(fill, fx.Node) else fill
            if bool((torch.as_tensor(filled) != 0).any()):
                raise ValueError("a bias of the attention scores that is replaced by another number than 0")
        return bias.through(node)


def _multiplied(conv: Conversion, bias: PairBias, factor: Any, divides: bool, at: int) -> PairBias:
    if factor in conv.static.nodes and factor.meta["val"].numel() == 1:
        factor = float(conv.static.evaluate(factor, SMALL_TABLE))
    if divides and (at != 0 or isinstance(factor, fx.Node)):
        raise ValueError("a bias of the attention scores divided by something other than a number")
    return bias.times(conv, 1 / factor if divides else factor)


def _gathered(conv: Conversion, node: fx.Node) -> PairBias | None:
    source, axis, index = node.args[:3]
    rows = conv.values.get(source)  # type: ignore[arg-type]
    if not isinstance(rows, TracedValue) or not rows.per_token or index not in conv.static.nodes:
        return None
    shape = pair_dims(node.meta["val"])
    if len(shape) < 3 or shape[-2:] != (T, T) or int(axis) % len(shape) != len(shape) - 1:  # type: ignore[call-overload]
        return None
    if rows.axis != len(shape) - 2 or rows.dims[:-1] != shape[:-1]:
        return None
    lead, width = rows.dims[:-2], rows.dims[-1]

    def numbers(tokens: int) -> Tensor:
        return torch.arange(1, prod(lead) * tokens * width + 1, dtype=torch.float64).view(*lead, tokens, width)

    return PairBias((PairRows(conv.view(rows, (prod(lead), T, width)), source, numbers, (node,)),))  # type: ignore[arg-type]


def _of_distances(conv: Conversion, node: fx.Node) -> PairBias | None:
    """Queries times a static table of all distances: q (.., T, D) by (.., D, n), where n grows with the length of the
    sequence and a longer sequence has the same columns and more. None for other products."""
    query, table = node.args[:2]
    q = conv.values.get(query)  # type: ignore[arg-type]
    if not isinstance(q, TracedValue) or not q.per_token or q.axis != len(q.dims) - 2 or table not in conv.static.nodes:
        return None
    if isinstance(node.meta["val"].shape[-1], int):
        return None
    short, longer = (conv.static.evaluate(table, count).flatten(0, -3) for count in _LENGTHS)  # type: ignore[arg-type, union-attr]
    heads, dim, width = short.shape
    starts = [s for s in range(longer.shape[2] - width + 1) if torch.equal(longer[..., s : s + width], short)]
    steps, rest = divmod(starts[0] if starts else 1, _LENGTHS[1] - _LENGTHS[0])
    if rest or longer.shape[:2] != short.shape[:2] or prod(q.dims[:-2]) != heads:
        raise ValueError("a product of queries with a table that depends on the number of tokens")
    whole = conv.static.evaluate(table, conv.max_tokens).flatten(0, -3).flip(2)  # type: ignore[arg-type]
    rows = conv.emit(aten.view.default, conv.view(q, (heads, T, dim)).node, [-1, heads, 1, dim])
    matrix = conv.constant("table_of_distances", whole[None].contiguous()).node
    product = conv.emit(aten.view.default, conv.emit(OPS["bmm"].overload, rows, matrix), [-1, heads, whole.shape[2]])

    def numbers(tokens: int) -> Tensor:
        own = conv.static.evaluate(table, tokens).shape[-1]  # type: ignore[arg-type]
        last = whole.shape[2] - steps * (conv.max_tokens - tokens)
        behind = torch.arange(heads * tokens, dtype=torch.float64).view(*q.dims[:-2], tokens, 1) * whole.shape[2]
        return behind + (last - torch.arange(own))

    return PairBias((PairRows(TracedValue(product, (heads, T, whole.shape[2])), node, numbers, grows=True),))


def _scaled(conv: Conversion, rows: TracedValue, factor: Any) -> TracedValue:
    """Rows (H, T, C) times a number, or a number per query."""
    if not isinstance(factor, fx.Node):
        return TracedValue(conv.emit(aten.mul.Tensor, rows.node, float(factor)), rows.dims)
    by = conv.values.get(factor)
    if not isinstance(by, TracedValue) or by.axis != len(by.dims) - 2 or len(by.features) != by.features.count(1):
        raise ValueError("a bias of the attention scores times something other than a number per query")
    return TracedValue(conv.emit(aten.mul.Tensor, rows.node, conv.view(by, (1, T, 1)).node), rows.dims)


def row_biases(conv: Conversion, bias: PairBias, mask: Mask) -> tuple[AttentionRowBias | None, AttentionRowBias | None]:
    """The bias by distance of queries and that of keys, for the keys that `mask` leaves; None if a side has none.
    ValueError if a column depends on more than the distance."""
    found = [_row_bias(conv, part, mask) for part in bias.parts]
    of_queries, of_keys = ([one for one in found if one.of_keys is keys] for keys in (False, True))
    if max(len(of_queries), len(of_keys)) > 1:
        raise ValueError("two biases of the attention scores that depend on the same token")
    if of_keys and not mask.ahead:
        raise ValueError("a bias of the attention scores that depends on the key, of tokens that see no later ones")
    return next(iter(of_queries), None), next(iter(of_keys), None)


def _row_bias(conv: Conversion, bias: PairRows, mask: Mask) -> AttentionRowBias:
    heads, _, width = bias.rows.dims
    tokens = max(SMALL_TABLE, min(conv.max_tokens, width + 2))
    # rows that grow need no check of their ends, if their columns are the same for two lengths
    looks = [_by_distance(conv, bias, mask, n) for n in ((SMALL_TABLE, SMALL_TABLE + 7) if bias.grows else (tokens,))]
    found = {_in_order(look, width) for look in looks}
    if len(found) == 1 and (later := found.pop()) is not None:
        return AttentionRowBias(bias.rows, later, looks[0].of_keys)
    look = _by_distance(conv, bias, mask, conv.max_tokens)
    order = conv.constant("column_by_distance", look.columns.to(torch.int32))
    rows = TracedValue(conv.emit(OPS["columns"].overload, bias.rows.node, order.node), (heads, T, len(look.columns)))
    return AttentionRowBias(rows, -look.first, look.of_keys)


@dataclass(frozen=True)
class _Look:
    """The columns [n] by distance (query - key), from the smallest distance at which something is added, `first`, to
    the largest. begins_alone, ends_alone: whether no key before, or after, these distances is visible."""

    first: int
    columns: Tensor
    begins_alone: bool
    ends_alone: bool
    of_keys: bool


def _in_order(look: _Look, width: int) -> int | None:
    """The number of columns for later keys, if columns are ordered by distance and attention reads no others beside
    them; else None."""
    own = look.columns
    begins, ends = look.begins_alone or int(own[0]) == 0, look.ends_alone or int(own[-1]) == width - 1
    in_order = torch.equal(own, own[0] + torch.arange(len(own)))
    return int(own[0]) - look.first if in_order and begins and ends else None


def _by_distance(conv: Conversion, bias: PairRows, mask: Mask, tokens: int) -> _Look:
    at = torch.arange(tokens)
    seen = mask.seen.visible(at)
    columns, of_keys = _columns(conv, bias, seen)
    distance = at[:, None] - at[None, :] + tokens - 1
    found = torch.full((2 * tokens - 1,), UNSEEN)
    found = found.scatter_reduce(0, distance.flatten(), columns.flatten(), "amax")
    if not torch.equal(found[distance].masked_fill(~seen, UNSEEN), columns):
        raise ValueError("a bias of the attention scores that is more than one of the distance")
    used = (found >= 0).nonzero().flatten()
    if not len(used):
        raise ValueError("a bias of the attention scores that adds nothing")
    first, last = int(used[0]), int(used[-1])
    own = found[first : last + 1]
    if int(own.min()) < 0:
        raise ValueError("a bias of the attention scores that skips distances")
    alone = bool((found[:first] == UNSEEN).all()), bool((found[last + 1 :] == UNSEEN).all())
    return _Look(first - (tokens - 1), own, *alone, of_keys)


def _columns(conv: Conversion, bias: PairRows, seen: Tensor) -> tuple[Tensor, bool]:
    """[T, T]: the column that is added to the score of a query and a key, NOTHING or UNSEEN; and whether it comes from
    the key's row and not the query's."""
    tokens = len(seen)
    heads, _, width = bias.rows.dims
    before, value = bias.source, bias.numbers(tokens)
    for node in bias.trail:
        if op_name(node.target).split(".")[-1] not in _ARITHMETIC:
            value = _repeated(conv, node, before, value, tokens)
        before = node
    found = value.reshape(-1, tokens, tokens).long() - 1
    nothing = found < 0
    head, at = torch.arange(heads)[:, None, None] * tokens, torch.arange(tokens)
    places = (False, at[:, None]), (True, at[None, :])
    fits = [keys for keys, at in places if bool((nothing | ~seen | (found // width == head + at)).all())]
    if len(found) != heads or not fits or (fits[0] and bias.by_query):
        raise ValueError("a bias of the attention scores that is of another token or head than the query or the key")
    columns = (found % width).masked_fill(nothing, NOTHING).masked_fill(~seen, UNSEEN)
    if not bool((columns == columns[0]).all()):
        raise ValueError("a bias of the attention scores that heads look up in different places")
    return columns[0], fits[0]


def _repeated(conv: Conversion, node: fx.Node, before: fx.Node, value: Tensor, tokens: int) -> Tensor:
    """The result of a node of the trail with `value` [..] in place of its operand `before`."""

    def given(arg: fx.Node) -> Any:
        return value if arg is before else conv.static.evaluate(arg, tokens)

    args = fx.map_arg(node.args, given)
    return node.target(*args).to(torch.float64)  # type: ignore[operator]
