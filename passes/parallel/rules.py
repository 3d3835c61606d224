"""How ranks compute a call whose arguments are divided (Shoeybi et al. 2019, arXiv:1909.08053)."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ...compiler.graph.graph import attention_spec
from ...compiler.graph.interpret import eager
from ...compiler.graph.tensor_types import TOKENS, type_of
from ...compiler.ops import OPS, Division, named_arguments, op_of, traits_of
from .columns import columns_of, experts_of, words_of
from .cuts import Conflict, Cut, Partial, Routed, Seed, State, elements
from .moves import MOVES
from .norms import norm_of
from .values import Divided, Values, map_values, seeds_of, size_of

aten = torch.ops.aten
_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_FACTORS = {aten.mul.Tensor: (0, 1), aten.div.Tensor: (0,), aten.neg.default: (0,)}


def divide_call(values: Values, node: fx.Node) -> Divided:
    """The call as ranks compute it. Conflict if they cannot with the current division; Stopped if it depends on a
    conflict."""
    states = {arg: values.state(arg) for arg in node.all_input_nodes}
    own = columns_of(values, node) or experts_of(values, node) or words_of(values, node)
    if own is not None or not any(states.values()):
        return own or Divided(None, node.args)
    if node.target is operator.getitem or traits_of(node.target).selects_rows:
        return Divided(states[node.args[0]], (node.args[0], *values.all_whole(node.args[1:])))  # type: ignore[index]
    if any(isinstance(state, Routed) for state in states.values()):
        return _routed(values, node)
    if any(isinstance(state, Cut) for state in states.values()):
        return _cut(values, node)
    return _sums(values, node)


def _cut(values: Values, node: fx.Node) -> Divided:
    """A call on parts of values."""
    traits = traits_of(node.target)
    for division in traits.divisions:
        if (found := _division(values, node, division)) is not None:
            return found
    if (norm := norm_of(values, node)) is not None:
        return norm
    if node.target in MOVES:
        return MOVES[node.target](values, node)
    if traits.elementwise:
        return _elementwise(values, node)
    if node.target is OPS["reduce"].overload:
        return _reduce(values, node)
    if traits.by_line:
        return _by_line(values, node)
    return Divided(None, values.all_whole(node.args))


# -- values that are sums over the ranks ------------------------------------------------------------------------------


def _sums(values: Values, node: fx.Node) -> Divided:
    """A call on values that are sums over ranks: on each rank's summand if the call is linear, else on the total."""
    kept = _is_linear(values, node)
    return Divided(Partial(_seeds(values, node)), node.args) if kept else Divided(None, values.all_whole(node.args))


def _is_linear(values: Values, node: fx.Node) -> bool:
    given = [isinstance(values.state(a), Partial) if isinstance(a, fx.Node) else False for a in node.args]
    if node.target in _SUMS:
        return all(given) and len(node.args) == 2
    if node.target in _FACTORS:
        return sum(given) == 1 and given.index(True) in _FACTORS[node.target]  # pyright: ignore[reportArgumentType]
    if node.target is OPS["reduce"].overload:
        return node.args[1] in ("sum", "mean")
    return traits_of(node.target).strided


# -- values that one rank has per slot --------------------------------------------------------------------------------


def _routed(values: Values, node: fx.Node) -> Divided:
    """A call on the results of each slot's expert: on each rank if the call keeps slots separate, else on the total."""
    states = [values.state(a) for a in node.all_input_nodes]
    routed = [state for state in states if isinstance(state, Routed)]
    if len({state.index for state in routed}) > 1:
        raise Conflict("slots of two choices of experts meet", *routed)
    traits, first = traits_of(node.target), routed[0]
    plain = all(isinstance(state, Routed) or state is None for state in states)
    if plain and node.target in (aten.slice.Tensor, aten.view.default, aten.cat.default):
        return Divided(Routed(first.index, all(s.zeros for s in routed), _seeds(values, node)), node.args)
    if plain and traits.elementwise:
        return Divided(Routed(first.index, _keeps_zeros(values, node), _seeds(values, node)), node.args)
    return Divided(None, values.all_whole(node.args))


def _keeps_zeros(values: Values, node: fx.Node) -> bool:
    """Whether an elementwise call gives zeros in slots where its routed inputs are zeros."""

    def is_zero(arg: Any) -> bool:
        state = values.state(arg) if isinstance(arg, fx.Node) else None
        return isinstance(state, Routed) and state.zeros

    inputs = node.all_input_nodes
    if node.target is aten.mul.Tensor:
        return any(map(is_zero, node.args))
    if node.target is aten.div.Tensor:
        return is_zero(node.args[0])
    if not all(map(is_zero, inputs)):
        return False
    found = eager(node.target)(*map_values(node.args, lambda _: torch.zeros(1)), **node.kwargs)
    return bool((found == 0).all())


# -- values of which each rank has a part -----------------------------------------------------------------------------


def _division(values: Values, node: fx.Node, division: Division) -> Divided | None:
    """The call by one of its op's divisions; None if that division does not match the divided arguments."""
    named = named_arguments(node)
    given = {name: value for name, value in named.items() if isinstance(value, fx.Node)}
    cuts: dict[str, Cut] = {}
    for name, axis in division.axes.items():
        cut = values.cut_of(given[name]) if name in given else None
        if cut is not None and cut.axis == axis % len(type_of(given[name]).shape):
            cuts[name] = cut
    if not cuts:
        return None
    most = max(size_of(given[name], division.axes[name]) for name in cuts)
    widest = next(cut for name, cut in cuts.items() if size_of(given[name], division.axes[name]) == most)
    if traits_of(node.target).attention and _scores_keys(node) and not ("k" in cuts and cuts["k"].divides):
        raise Conflict("ranks have the same keys, which each would choose among by its own queries", *cuts.values())
    local: dict[str, Any] = {}
    for name, value in given.items():
        axis = division.axes.get(name)
        if name in division.once and division.result is None:
            local[name] = values.once(value)
        elif axis is None or size_of(value, axis) == 1 or (name not in cuts and value.op != "get_attr"):
            _only_one(values, value, axis, widest)
            local[name] = values.whole(value)
        elif value.op == "get_attr":
            local[name] = values.part(value, axis, widest)
        else:
            _shares(cuts[name], size_of(value, axis), widest, most)
    state: State
    if division.result is None:
        if not widest.divides:
            raise Conflict("ranks have the same parts, which a sum would count twice", widest)
        state = Partial(seeds_of(cuts.values()))
    else:
        rank = len(type_of(node).shape)
        state = Cut(division.result % rank, widest.cuts, seeds_of(cuts.values()))
    found = op_of(node.target)
    assert found is not None
    return Divided(state, found.ordered(**{**named, **local}))


def _scores_keys(node: fx.Node) -> bool:
    """Whether an attention drops keys by how much its queries attend to them."""
    policy = attention_spec(node).policy
    return policy is not None and policy.chooses


def _only_one(values: Values, value: fx.Node, axis: int | None, cut: Cut) -> None:
    """Raise Conflict if a whole value has more than one element on the divided axis."""
    if axis is not None and size_of(value, axis) > 1:
        raise Conflict(f"{value.name} is whole", cut, values.state(value))


def _shares(cut: Cut, size: int, widest: Cut, most: int) -> None:
    """Raise Conflict unless each rank has exactly the elements that its elements of the widest argument share."""
    for own, wide in zip(map(elements, cut.cuts), map(elements, widest.cuts), strict=True):
        share, whole = len(wide) // len(own), most // size
        if len(wide) % len(own) or any(own[i // share] != element // whole for i, element in enumerate(wide)):
            raise Conflict(f"ranks have other parts of {size} than of {most}", cut, widest)


def _elementwise(values: Values, node: fx.Node) -> Divided:
    """An elementwise call: its inputs must be divided in the same way, or broadcast."""
    rank = len(type_of(node).shape)
    cuts = {a: found for a in node.all_input_nodes if (found := values.cut_of(a)) is not None}
    places = {(cut.axis - len(type_of(a).shape), cut.cuts) for a, cut in cuts.items()}
    if len(places) > 1:
        raise Conflict("ranks have different parts of its inputs", *cuts.values())
    [(axis, _)] = places
    cut = next(iter(cuts.values()))

    def local(arg: fx.Node) -> Any:
        if arg in cuts:
            return arg
        if size_of(arg, axis) == 1:
            return values.whole(arg)
        if arg.op != "get_attr":
            raise Conflict(f"{arg.name} is whole", cut, values.state(arg))
        return values.part(arg, axis, cut)

    args = map_values(node.args, local)
    return Divided(Cut(axis % rank, cut.cuts, _seeds(values, node)), args)


def _reduce(values: Values, node: fx.Node) -> Divided:
    given: tuple[Any, ...] = node.args
    x, kind, dim = given
    cut = values.cut_of(x)
    assert cut is not None
    axis: int = (dim % type_of(x).rank) - (type_of(x).rows is not None)
    if axis == cut.axis:
        if kind != "sum" or not cut.divides:
            raise Conflict(f"{kind} of an axis of which ranks have parts", cut)
        return Divided(Partial(cut.seeds), node.args)
    return Divided(Cut(cut.axis - (axis < cut.axis), cut.cuts, cut.seeds), node.args)


def _by_line(values: Values, node: fx.Node) -> Divided:
    """A call per line on divided lines; arguments that all lines share are whole."""
    kept = [a for a in node.all_input_nodes if values.cut_of(a) is not None]
    cuts = [cut for a in kept if (cut := values.cut_of(a)) is not None]
    lines = {(cut.axis, cut.cuts) for cut in cuts}
    if len(lines) > 1 or any(cut.axis == len(type_of(a).shape) - 1 for a, cut in zip(kept, cuts, strict=True)):
        raise Conflict("needs whole lines", *cuts)
    rows = [a for a in node.all_input_nodes if a not in kept and type_of(a).rows == TOKENS]
    if rows:
        raise Conflict(f"{rows[0].name} is whole", *cuts)
    return Divided(Cut(cuts[0].axis, cuts[0].cuts, _seeds(values, node)), _whole_but(values, node.args, kept))


def _whole_but(values: Values, args: Any, kept: list[fx.Node]) -> Any:
    """The arguments: those in `kept` as divided, all others whole."""
    return map_values(args, lambda arg: arg if arg in kept else values.whole(arg))


def _seeds(values: Values, node: fx.Node) -> frozenset[Seed]:
    """The products whose division led to that of a call's inputs."""
    return seeds_of(values.state(a) for a in node.all_input_nodes)
