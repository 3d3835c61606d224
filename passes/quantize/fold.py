"""Finds by data flow where a per-channel scale on the input of a linear layer can be folded.

To divide channel k of a layer's input by s[k] without changing the model, the producer of the channel must be able to
absorb 1 / s[k], and every reader of it must absorb s[k]. The values between producers and readers form a region: ops
that only move elements, add them, or multiply them by something else tie each of their elements to elements of their
operands. The region ends at producers (rows of a linear layer, a norm's weight, a constant vector) and at consumers
(columns of a linear layer); any other op that touches an element pins it to scale 1. Elements tied together form a
class with one free scale: with grouped-query attention, the o_proj channels of the query heads that share a KV head are
one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from ...compiler.graph.graph import Graph
from ...compiler.graph.printer import target_name
from ...compiler.ops import traits_of
from ...compiler.weights.handles import Constant, Derived, Weight
from .element_ties import Tie, full_shape, is_absorbing, ties
from .select import EXPERT, LINEAR, set_weight

MAX_REGION = 400
COLUMN_FACTORS, ROW_FACTORS = "column_factors", "row_factors"  # factors of a product's weight, in its node's meta


@dataclass(frozen=True)
class End:
    """One end of a region: the values that argument `arg` of `node` holds (a weight, or for a consumer its input).

    classes: [channels], the scale class of each channel (of each element, for a constant), -1 if it is pinned to 1.
    """

    node: fx.Node
    arg: int
    classes: Tensor


@dataclass(frozen=True)
class FoldGroup:
    """Linear layers that must be scaled together. `count` is the number of free scales; `reason` tells why it is 0."""

    consumers: tuple[End, ...]
    producers: tuple[End, ...]
    count: int
    reason: str = ""


@dataclass
class _FoldedRegion:
    graph: Graph
    blocked: dict[fx.Node, str]
    offsets: dict[fx.Node | tuple[fx.Node, int], int] = field(default_factory=dict)
    size: int = 0
    pending: list[fx.Node] = field(default_factory=list)
    links: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    pins: list[tuple[Tensor, str]] = field(default_factory=list)
    consumers: list[fx.Node] = field(default_factory=list)
    producers: list[fx.Node] = field(default_factory=list)
    constants: dict[tuple[fx.Node, int], int] = field(default_factory=dict)

    def block(self, key: fx.Node | tuple[fx.Node, int], count: int) -> Tensor:
        """The element numbers of a value, allocated at the first call."""
        if key not in self.offsets:
            self.offsets[key] = self.size
            self.size += count
            if isinstance(key, fx.Node):
                self.pending.append(key)
        return torch.arange(count) + self.offsets[key]

    def elements(self, node: fx.Node) -> Tensor:
        return self.block(node, full_shape(node).numel())

    def tie_channels(self, node: fx.Node, channels: int) -> None:
        """One scale per last-axis channel: the other axes share it."""
        mine = self.elements(node)
        if len(mine) > channels:
            self.links.append((mine, mine[torch.arange(len(mine)) % channels]))

    def pin(self, node: fx.Node, reason: str) -> None:
        self.pins.append((self.elements(node), reason))

    def grow(self) -> None:
        """Visit values until no new one is found."""
        while self.pending:
            node = self.pending.pop()
            if len(self.offsets) > MAX_REGION:
                self.pin(node, f"its input is tied to more than {MAX_REGION} other values")
                continue
            self._definition(node)
            for user in node.users:
                self._use(node, user)

    def _definition(self, node: fx.Node) -> None:
        if is_absorbing(node):
            if node in self.blocked:
                self.pin(node, self.blocked[node])
            else:
                self.tie_channels(node, full_shape(node)[-1])
                self.producers.append(node)
            return
        found = ties(self.graph, node)
        if isinstance(found, str):
            self.pin(node, f"its input comes through {found}")
            return
        mine = self.elements(node)
        for tie in found:
            self.links.append((mine[tie.out], self._operand(node, tie)[tie.source]))

    def _operand(self, node: fx.Node, tie: Tie) -> Tensor:
        if tie.operand.op != "get_attr":
            return self.elements(tie.operand)
        count = full_shape(tie.operand).numel()
        self.constants[node, tie.arg] = count
        return self.block((node, tie.arg), count)

    def _use(self, node: fx.Node, user: fx.Node) -> None:
        if user.op == "output":
            return self.pin(node, "its input is an output of the model")
        reads = [arg for arg in _flat(user.args) if arg is node]
        if user.target in (LINEAR, EXPERT) and user.args[0] is node and len(reads) == 1:
            if user in self.blocked:
                return self.pin(node, self.blocked[user])
            self.tie_channels(node, full_shape(node)[-1])
            self.consumers.append(user)
            return None
        found = [] if is_absorbing(user) else ties(self.graph, user)
        if isinstance(found, str) or sum(tie.operand is node for tie in found) < len(reads):
            return self.pin(node, f"its input is also read by {target_name(user.target)}")
        self.elements(user)
        return None

    def labels(self) -> Tensor:
        """The class of every element: the least element tied to it, or the number of a pin, which is lower than any."""
        first = len(self.pins)
        label = torch.arange(first, first + self.size)
        for number, (elements, _) in enumerate(self.pins):
            label[elements] = label[elements].clamp(max=number)
        while True:
            before = label.clone()
            for a, b in self.links:
                low = torch.minimum(label[a], label[b])
                label.scatter_reduce_(0, a, low, "amin")
                label.scatter_reduce_(0, b, low, "amin")
            if torch.equal(before, label):
                return label


def _flat(args: object) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(args, lambda n: found.append(n) or n)  # type: ignore[arg-type]
    return found


def fold_group(graph: Graph, start: fx.Node, blocked: dict[fx.Node, str]) -> FoldGroup:
    """The group of `start`, a linear node; `blocked` maps linear nodes that can take no scale to the reason."""
    region = _FoldedRegion(graph, blocked)
    source = start.args[0]
    assert isinstance(source, fx.Node)
    region.elements(source)
    region.grow()
    label, first = region.labels(), len(region.pins)

    def channels(node: fx.Node) -> Tensor:
        return label[region.elements(node)[: full_shape(node)[-1]]]

    inputs = {node: channels(node.args[0]) for node in region.consumers}  # type: ignore[arg-type]
    free = torch.cat([*inputs.values(), label[:0]]).unique()
    free = free[free >= first]

    def classes(found: Tensor) -> Tensor:
        where = torch.searchsorted(free, found).clamp(max=len(free) - 1)
        return torch.where(free[where] == found, where, -1)

    if not len(free):
        pinned = label[region.elements(source)].min()
        return FoldGroup((), (), 0, region.pins[int(pinned)][1])
    consumers = [End(node, 0, classes(found)) for node, found in inputs.items()]
    producers = [End(node, traits_of(node.target).absorbs[0], classes(channels(node))) for node in region.producers]
    for (node, arg), count in region.constants.items():
        producers.append(End(node, arg, classes(label[region.block((node, arg), count)])))
    return FoldGroup(
        tuple(end for end in consumers if (end.classes >= 0).any()),
        tuple(end for end in producers if (end.classes >= 0).any()),
        len(free),
    )


def factors(scales: Tensor, classes: Tensor) -> Tensor:
    """The scale of each channel, [channels]: 1 if it is pinned. scales: [classes]."""
    return torch.where(classes >= 0, scales[classes.clamp(min=0)], 1.0)


def multiplied(weight: Weight, factor: Tensor) -> Derived:
    """A lazy weight * factor in float32, in the weight's shape, to which the factor is broadcast."""
    return Derived(lambda value: value.to(torch.float32) * factor, (weight,), weight.shape, torch.float32)


def apply_fold(graph: Graph, group: FoldGroup, scales: Tensor) -> None:
    """Multiply the columns of all consumers by their scales, [group.count], and divide the producers of their inputs by
    the same scales."""
    for end in group.consumers:
        factor = factors(scales, end.classes)
        _multiply(graph, end.node, 1, factor)
        _note(end.node, COLUMN_FACTORS, factor)
    for end in group.producers:
        inverse = 1.0 / factors(scales, end.classes)
        if not is_absorbing(end.node):
            constant = end.node.args[end.arg]
            assert isinstance(constant, fx.Node)
            _multiply(graph, end.node, end.arg, inverse.reshape(graph.weight(constant).shape))
        else:
            _scale_output(graph, end.node, inverse)


def _note(node: fx.Node, key: str, factor: Tensor) -> None:
    """Record the factors of a product's weight columns or rows: adapters must be multiplied by them, too."""
    node.meta[key] = node.meta[key] * factor if key in node.meta else factor


def _multiply(graph: Graph, node: fx.Node, arg: int, factor: Tensor) -> None:
    weight = node.args[arg]
    if isinstance(weight, fx.Node):
        set_weight(graph, [(node, arg)], multiplied(graph.weight(weight), factor))


def _scale_output(graph: Graph, node: fx.Node, factor: Tensor) -> None:
    """Multiply channel i of a node's result by factor[i], in the weights that absorb it."""
    asked = traits_of(node.target)
    scale, *added = asked.absorbs
    if asked.product:
        _note(node, ROW_FACTORS, factor)
    if node.args[scale] is None:
        with graph.fx.inserting_before(node):
            node.update_arg(scale, graph.add_weight("norm_scale", Constant(factor)))
    else:
        _multiply(graph, node, scale, factor[:, None] if asked.product else factor)
    for arg in added:
        _multiply(graph, node, arg, factor)
