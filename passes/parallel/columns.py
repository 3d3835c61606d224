"""The beginnings of a division: products whose columns, experts or vocabulary the ranks divide."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import fx

from ...compiler.graph.graph import Graph
from ...compiler.graph.tensor_types import TensorType, type_of
from ...compiler.ops import OPS, named_arguments, op_of, traits_of
from ...compiler.weights.handles import Constant
from ...compiler.weights.shards import shard
from .cuts import Conflict, Cut, Routed, Seed, evenly, joined
from .values import Divided, Local, Values, seeds_of

aten = torch.ops.aten
LINEAR, EXPERTS, EMBEDDING = (OPS[name].overload for name in ("linear", "expert_linear", "embedding"))
SORTED = OPS["expert_columns"].overload
_PRODUCTS = (LINEAR, EXPERTS, EMBEDDING)
WORDS, BY_EXPERT = -1, -2  # values for the piece of a seed that is not columns


def find_seeds(graph: Graph, ranks: int, tensors: bool, experts: bool) -> dict[Seed, int]:
    """All products, with each piece of their columns divided into as many parts as possible. tensors: divide columns
    and vocabulary; experts: divide whole experts, instead of their columns."""
    found: dict[Seed, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        named = named_arguments(node) if node.target in _PRODUCTS else {}
        if experts and node.target is EXPERTS and _shares_experts(named, ranks):
            found[node.name, BY_EXPERT] = ranks
        elif tensors and node.target in (LINEAR, EXPERTS) and _is_weight(named["weight"]):
            for number, (begin, end) in enumerate(pieces_of(node)):
                found[node.name, number] = most_parts(end - begin, ranks)
        elif tensors and _looks_up_words(node):
            found[node.name, WORDS] = ranks if type_of(named["table"]).shape[0] % ranks == 0 else 1
    return {seed: parts for seed, parts in found.items() if parts > 1}


def _is_weight(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr"


def _shares_experts(named: dict[str, object], ranks: int) -> bool:
    """Whether the product chooses experts by an index and ranks can have equal numbers of them."""
    weight = named["weight"]
    return _is_weight(weight) and named["index"] is not None and type_of(weight).shape[0] % ranks == 0  # type: ignore[arg-type]


def _looks_up_words(node: fx.Node) -> bool:
    if node.target is not EMBEDDING or not _is_weight(node.args[1]):
        return False
    index = node.args[0]
    return isinstance(index, fx.Node) and index.op == "placeholder" and index.target == "token_ids"


def most_parts(size: int, ranks: int, below: int = 0) -> int:
    """The largest number of equal parts of `size` that ranks can share evenly; less than `below` if it is not 0."""
    return next(n for n in range((below or ranks + 1) - 1, 0, -1) if ranks % n == 0 and size % n == 0)


def pieces_of(node: fx.Node) -> list[tuple[int, int]]:
    """The pieces that a product's columns are sliced into, such as gate and up; one piece if they are not sliced."""
    size = type_of(node).shape[-1]
    found = sorted(_slices(node, type_of(node).shape[:-1], size))
    ends = [0, *(end for _, end in found)]
    return (
        found
        if found and found[0][1] and ends[:-1] == [begin for begin, _ in found] and ends[-1] == size
        else [(0, size)]
    )


def _slices(node: fx.Node, lead: tuple[int, ...], size: int) -> set[tuple[int, int]]:
    """The ranges of the last axis of `size` columns, after the axes `lead`, that are sliced from a value or from a view
    of it."""
    found: set[tuple[int, int]] = set()
    for user in node.users:
        if user.target is aten.view.default:
            found |= _slices(user, lead, size)
            continue
        args: tuple[Any, ...] = user.args
        shape = type_of(node).shape
        if _keeps_columns(node, user):
            found |= _slices(user, lead, size)
            continue
        axis: int = args[1] - 1 if user.target is aten.slice.Tensor else -1
        if axis < 0 or (*args, 1)[4] != 1 or prod(shape[:axis]) != prod(lead):
            return {(0, 0)}
        inner = prod(shape[axis + 1 :])
        begin, end = args[2] * inner, min(args[3], shape[axis]) * inner
        found |= {(begin + a, begin + b) for a, b in pieces_of(user)} if axis == len(shape) - 1 else {(begin, end)}
    return found


def _keeps_columns(node: fx.Node, user: fx.Node) -> bool:
    """Whether each column of a call's result depends only on the same column of a value, as in a short convolution."""
    traits = traits_of(user.target)
    if user.op != "call_function" or not isinstance(user.meta["type"], TensorType):
        return False
    if type_of(user).shape != type_of(node).shape or user.args[0] is not node:
        return False
    alone = traits.elementwise and len(user.all_input_nodes) == 1
    last = len(type_of(node).shape) - 1
    return alone or any(
        d.axes.get("x") == d.result == last or d.axes.get("x") == d.result == -1 for d in traits.divisions
    )


def columns_of(values: Values, node: fx.Node) -> Divided | None:
    """A product of whole rows, of which each rank computes some columns; None for another call."""
    if node.target not in (LINEAR, EXPERTS) or not _has_seeds(values, node, range(len(pieces_of(node)))):
        return None
    named = named_arguments(node)
    if values.cut_of(named["x"]) is not None:
        return None
    pieces = pieces_of(node)
    parts = [values.seeds.get((node.name, number), 1) for number in range(len(pieces))]
    cuts = joined([evenly(*piece, count, values.ranks) for piece, count in zip(pieces, parts, strict=True)])
    seeds = frozenset((node.name, n) for n, count in enumerate(parts) if count > 1)
    cut = Cut(len(type_of(node).shape) - 1, cuts, seeds)
    local = {name: values.whole(named[name]) for name in ("x", "index") if name in named}
    weight, bias = named["weight"], named["bias"]
    local["weight"] = values.part(weight, len(type_of(weight).shape) - 2, cut)
    local["bias"] = None if bias is None else values.part(bias, len(type_of(bias).shape) - 1, cut)
    return Divided(cut, _ordered(node, local))


def experts_of(values: Values, node: fx.Node) -> Divided | None:
    """A product with experts, each on one rank: a rank gives zeros in the slots of other ranks' experts. Also a sort of
    columns by each slot's expert, which leaves undefined numbers in those slots. None for another call."""
    named = named_arguments(node) if node.target in (EXPERTS, SORTED) else {}
    state = values.state(named["x"]) if named else None
    own = isinstance(state, Routed) if node.target is SORTED else _has_seeds(values, node, (BY_EXPERT,))
    if not own:
        if isinstance(state, Routed):
            raise Conflict("experts of which all ranks have all", state)
        return None
    index = named["index"]
    if isinstance(state, Routed) and state.index != index.name:
        raise Conflict("slots of two choices of experts meet", state)
    experts = type_of(named["order" if node.target is SORTED else "weight"]).shape[0]
    seeds = seeds_of([state]) | (frozenset() if node.target is SORTED else frozenset({(node.name, BY_EXPERT)}))
    cut = Cut(0, evenly(0, experts, values.ranks, values.ranks), seeds)
    local = {
        name: values.part(named[name], 0, cut) for name in ("weight", "bias", "order") if named.get(name) is not None
    }
    x = named["x"] if isinstance(state, Routed) else values.whole(named["x"])
    values.whole(index)
    args = _ordered(node, {**local, "x": x, "index": Local(index, cut.cuts)})
    return Divided(Routed(index.name, node.target is EXPERTS, seeds), args)


def words_of(values: Values, node: fx.Node) -> Divided | None:
    """A look-up of tokens in a table of which each rank has some rows. The results are summed over ranks immediately,
    because later layers add to them. None for another call."""
    if node.target is not EMBEDDING or not _has_seeds(values, node, (WORDS,)):
        return None
    index, table = node.args
    size = type_of(table).shape[0]  # type: ignore[arg-type]
    seed = frozenset({(node.name, WORDS)})
    cut = Cut(0, evenly(0, size, values.ranks, values.ranks), seed)
    args = Local(index, cut.cuts), values.part(table, 0, cut)  # type: ignore[arg-type]
    return Divided(None, args, _summed_words)


def _summed_words(graph: Graph, node: fx.Node) -> fx.Node:
    """The rows of all tokens, summed over ranks, which give zeros for tokens outside their part of the table."""
    index, table = node.args
    size = type_of(table).shape[0]  # type: ignore[arg-type]
    inside = graph.call(aten.clamp.default, index, 0, size - 1, origin=node)
    here = graph.call(aten.eq.Tensor, inside, index, origin=node)
    found = graph.call(EMBEDDING, inside, table, origin=node)
    mask = graph.call(torch.ops.prims.convert_element_type.default, here, torch.float32, origin=node)
    mask = graph.call(aten.view.default, mask, [-1] + [1] * (type_of(table).rank - 1), origin=node)  # type: ignore[arg-type]
    own = graph.call(aten.mul.Tensor, found, mask, origin=node)
    return graph.call(OPS["all_reduce"].overload, own, origin=node)


def local_index(graph: Graph, local: Local) -> fx.Node:
    """A call at the insertion point that numbers experts or words from the rank's first one. The numbers of other
    ranks' experts or words then lie outside the rank's table."""
    firsts = Constant(torch.tensor([own[0][0] for own in local.cuts], dtype=torch.int32))
    ranks = len(local.cuts)
    first = graph.add_weight("rank.first", shard(firsts, 0, evenly(0, ranks, ranks, ranks)))
    if type_of(local.index).rank > 1:
        return graph.call(aten.sub.Tensor, local.index, first)
    column = graph.call(aten.view.default, local.index, [-1, 1])
    return graph.call(aten.view.default, graph.call(aten.sub.Tensor, column, first), [-1])


def _has_seeds(values: Values, node: fx.Node, pieces: Iterable[int]) -> bool:
    return any((node.name, piece) in values.seeds for piece in pieces)


def _ordered(node: fx.Node, local: dict[str, object]) -> tuple[object, ...]:
    found = op_of(node.target)
    assert found is not None
    return found.ordered(**{**named_arguments(node), **local})
