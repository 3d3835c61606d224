"""Copies a traced layer's nodes in place of equal layers: the other half of kinds.py.

The nodes that the first layer of a kind emitted are copied with other inputs and weights. Converting the layer itself
would emit the same nodes, if the conversion depends only on values that are equal in both layers. If that cannot be
shown, NotRepeatable requests a trace of every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from ...graph.graph import set_layer
from ...graph.tensor_types import type_of
from ...ops import traits_of
from ...weights.handles import Constant
from ..convert.conversion import Conversion
from ..convert.index_handlers import LOOKED_THROUGH
from ..convert.values import TracedValue, Unrepresentable
from .kinds import NotRepeatable, RepeatedLayer
from .marks import ENTER, LEAVE, REPEATED


@dataclass(frozen=True)
class _Input:
    """An input of the first layer of a kind: its value, and its nodes in the export outside and inside the layer."""

    value: Any
    source: fx.Node
    mark: fx.Node


@dataclass
class _LayerRegion:
    """The nodes that the first layer of a kind emitted, its inputs and its results by slot, and the results of its
    copies."""

    before: fx.Node
    last: fx.Node | None = None
    inputs: dict[int, _Input] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    nodes: list[fx.Node] = field(default_factory=list)
    replays: dict[int, dict[int, Any]] = field(default_factory=dict)


class Replay:
    """The CallFollower of the marks around traced layers, and of repeated layers."""

    def __init__(self, repeats: Sequence[RepeatedLayer]) -> None:
        self._repeats = repeats
        self._regions: dict[int, _LayerRegion] = {}

    def follow(self, conv: Conversion, node: fx.Node) -> Any:
        """The value at a mark, or the results of copied nodes for repeated layers; None for any other node. Raises
        NotRepeatable.

        It is called before operands are checked: a layer may pass on an unused value without a token-major form.
        """
        if node.target is REPEATED:
            return self._repeated(conv, node)
        if node.target not in (ENTER, LEAVE):
            return None
        operand, kind, slot = cast("tuple[fx.Node, int, int]", node.args)
        value = conv.values[operand]
        last = next(iter(reversed(conv.graph.fx.nodes)))
        region = self._regions.setdefault(kind, _LayerRegion(last))
        if node.target is ENTER:
            region.inputs[slot] = _Input(value, operand, node)
        else:
            region.last = region.last or last
            region.results[slot] = value
        return value

    def check(self) -> None:
        """Raise NotRepeatable if a value inside a copied layer, other than its results, is used outside. Called after
        all nodes are converted."""
        for region in self._regions.values():
            inside = set(region.nodes)
            shown = {value.node for value in region.results.values() if isinstance(value, TracedValue)}
            if any(user not in inside for node in inside - shown for user in node.users):
                raise NotRepeatable("a value inside a layer is used outside")

    def _repeated(self, conv: Conversion, node: fx.Node) -> Any:
        """The result of layers that were not traced. The first request for a result of a layer copies its nodes."""
        sources, _, numbers, slots = node.args
        given = [(conv.values[source], source in conv.static.nodes) for source in sources]  # type: ignore[union-attr, index]
        result = None
        for number, slot in zip(numbers, slots, strict=True):  # type: ignore[arg-type]
            repeat = self._repeats[number]
            region = self._regions.get(repeat.kind)
            if region is None or region.last is None or slot not in region.results:
                raise NotRepeatable(f"nothing is left of layer {repeat.source}")
            if number not in region.replays:
                region.replays[number] = _replay(conv, repeat, region, dict(zip(repeat.slots, given, strict=True)))
            result = region.replays[number][slot]
            given = [(result, node in conv.static.nodes)]
        return result


def _replay(
    conv: Conversion, repeat: RepeatedLayer, region: _LayerRegion, given: dict[int, tuple[Any, bool]]
) -> dict[int, Any]:
    """The results of a layer, by slot. given: (value, static) for each slot whose input differs from the first
    layer's."""
    used = {slot: new for slot, new in given.items() if slot in region.inputs}
    bad = next((value for value, _ in used.values() if isinstance(value, Unrepresentable)), None)
    if bad is not None:
        return dict.fromkeys(region.results, bad)
    copies: dict[fx.Node, fx.Node] = {}
    for slot, old in region.inputs.items():
        new = old.value
        if slot in used:
            new, static = used[slot]
            if not _same_to_the_conversion(conv, old, new, static):
                raise NotRepeatable(f"{repeat.path} is not given what {repeat.source} is")
        if isinstance(old.value, TracedValue) and copies.setdefault(old.value.node, new.node) is not new.node:
            raise NotRepeatable(f"{repeat.source} is given one value twice")
    _rename_weights(conv, repeat, copies)
    if not region.nodes:
        assert region.last is not None, "a layer is left before it is repeated"
        region.nodes = _between(region.before, region.last)
    for node in region.nodes:
        copies[node] = _copy(conv, node, copies, repeat)
    return {slot: _moved(value, copies) for slot, value in region.results.items()}


def _same_to_the_conversion(conv: Conversion, old: _Input, new: Any, static: bool) -> bool:
    """Whether converting a layer would emit the same nodes with `new` in place of an input of the first layer."""
    if not isinstance(old.value, TracedValue) or not isinstance(new, TracedValue):
        return False
    if old.value.dims != new.dims or type_of(old.value.node) != type_of(new.node):
        return False
    if static != (old.source in conv.static.nodes) or old.mark in conv.static.looked_at:
        return False
    known = [n for n in (old.value.node, new.node) if n.op != "call_function" or n.target in LOOKED_THROUGH]
    return not known or old.value.node is new.node


def _rename_weights(conv: Conversion, repeat: RepeatedLayer, copies: dict[fx.Node, fx.Node]) -> None:
    for old, new in repeat.renames.items():
        before, after = conv.stored(old), conv.stored(new)
        if before is None or after is None:
            continue
        if type_of(before) != type_of(after):
            raise NotRepeatable(f"{new} has another type than {old}")
        if old in conv.static.loaded and not torch.equal(*(conv.weights[n].load() for n in (old, new))):
            raise NotRepeatable(f"{new} decides what the layer computes")
        copies[before] = after


def _between(before: fx.Node, last: fx.Node) -> list[fx.Node]:
    nodes, node = [], before
    while node is not last:
        node = node.next
        nodes.append(node)
    return nodes


def _copy(conv: Conversion, old: fx.Node, copies: dict[fx.Node, fx.Node], repeat: RepeatedLayer) -> fx.Node:
    graph = conv.graph
    if old.op == "get_attr":  # a constant that the layer makes
        weight = graph.weight(old)
        assert isinstance(weight, Constant)
        return graph.add_weight(str(old.target).split("#")[0], Constant(weight.value))
    new = graph.fx.node_copy(old, lambda arg: _operand(conv, arg, copies))
    if traits_of(new.target).stateful:
        set_layer(new, conv.next_layer())
    module = str(new.meta.get("module", ""))
    if module == repeat.source or module.startswith(f"{repeat.source}."):
        new.meta["module"] = repeat.path + module[len(repeat.source) :]
    return new


def _operand(conv: Conversion, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """The operand of a copied node: a copy, or a node that all layers share."""
    if node in copies:
        return copies[node]
    if node.op == "placeholder" or (node.op == "get_attr" and not conv.is_lifted(str(node.target))):
        return node
    raise NotRepeatable("a layer uses a value that it is not given")


def _moved(value: Any, copies: dict[fx.Node, fx.Node]) -> Any:
    if not isinstance(value, TracedValue):
        return value
    if value.node not in copies:
        raise NotRepeatable("a layer returns a value that it is not given")
    return TracedValue(copies[value.node], value.dims)
