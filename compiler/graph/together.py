"""The reference interpreter over many sequences at once, node by node, so that every weight is loaded once.

A variant is the model with some calls changed. Only values that differ from the model's are computed for it, from the
first changed call on. To find the effect of each of many weights on the logits then costs much less than one run per
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from ..ops import OPS
from ..weights.handles import Weight
from .graph import Graph
from .interpret import as_compute, eager, input_values
from .tensor_types import type_of

Change = Callable[[list[Any]], list[Any]]
"""The arguments that a call gets, for those that it would get."""
Variant = Mapping[fx.Node, Weight | Change]
"""The changed calls; a call whose argument 1 is a weight may map to the weight that it reads instead."""
MODEL = -1
Lane = tuple[int, int]  # the number of a variant, or MODEL, and the number of a sequence
_LINEAR = OPS["linear"].overload


@dataclass(frozen=True)
class SequenceLogits:
    """The logits float32 [T, vocab] of one sequence, of the model (MODEL) or of a variant by its number."""

    sequence: int
    variant: int
    logits: Tensor


@torch.no_grad()
def run_together(
    graph: Graph,
    sequences: Sequence[Sequence[int]],
    variants: Sequence[Variant] = (),
    heard: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[SequenceLogits]:
    """The logits (or hidden states, of a graph that embeds) of all sequences, of the model and of each variant.

    Logits are large, so they are yielded for one sequence after the other: the model's own, then those of all variants.
    heard: called with the work done and the total work, measured in sizes of weights.
    """
    order = _needed(graph)
    first = _large(graph, order)
    body, tail = order[:first], order[first:]
    env: dict[fx.Node, dict[Lane, Any]] = {}
    last_use = {arg: node for node in order for arg in node.all_input_nodes}
    lanes, inputs = range(len(sequences)), [input_values(graph, ids) for ids in sequences]
    touched = _touched(order, variants)
    costs = {node: _size(node) * len(touched[node]) for node in body}
    last = sum(map(_size, tail)) * (1 + len(variants))
    total, done = max(1, (sum(costs.values()) + last) * len(sequences)), 0
    for node in body:
        if node.op == "call_function":
            weights = _Weights(graph, node, variants)
            env[node] = {(v, s): _call(node, env, weights, v, s) for v in touched[node] for s in lanes}
        elif node.op == "placeholder":
            env[node] = {(MODEL, s): inputs[s][str(node.target)] for s in lanes}
        for arg in node.all_input_nodes:
            if last_use[arg] is node:
                env.pop(arg, None)
        done += costs[node] * len(sequences)
        heard(done, total)
    held = {node: _Weights(graph, node, variants) for node in tail if node.op == "call_function"}
    for s in lanes:
        for v in range(MODEL, len(variants)):
            yield SequenceLogits(s, v, _finish(graph, tail, held, env, v, s))
        done += last
        heard(done, total)


def logits_of(graph: Graph, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """The logits of each sequence, float32 [T, vocab]."""
    return [found.logits for found in run_together(graph, sequences)]


class _Weights:
    """The weights that one call reads, loaded, and how variants change its arguments."""

    def __init__(self, graph: Graph, node: fx.Node, variants: Sequence[Variant]) -> None:
        self.own = {a: as_compute(graph.weight(a).load()) for a in node.all_input_nodes if a.op == "get_attr"}
        self.changes = {v: _change(variant[node]) for v, variant in enumerate(variants) if node in variant}


def _change(changed: Weight | Change) -> Change:
    if not isinstance(changed, Weight):
        return changed
    loaded = as_compute(changed.load())
    return lambda args: [args[0], loaded, *args[2:]]


def _touched(order: Sequence[fx.Node], variants: Sequence[Variant]) -> dict[fx.Node, list[int]]:
    """For every node MODEL and the variants in which its value differs from the model's."""
    found: dict[fx.Node, list[int]] = {}
    for node in order:
        own = {v for v, variant in enumerate(variants) if node in variant}
        found[node] = sorted(own.union({MODEL}, *(found[arg] for arg in node.all_input_nodes if arg in found)))
    return found


def _size(node: fx.Node) -> int:
    """The number of elements of the weights that a node reads."""
    return sum(prod(type_of(arg).shape) for arg in node.all_input_nodes if arg.op == "get_attr")


def _call(
    node: fx.Node, env: Mapping[fx.Node, Mapping[Lane, Any]], weights: _Weights, variant: int, sequence: int
) -> Any:
    def value(arg: fx.Node) -> Any:
        if arg in weights.own:
            return weights.own[arg]
        known = env[arg]
        return known[variant, sequence] if (variant, sequence) in known else known[MODEL, sequence]

    args = list(fx.map_arg(tuple(node.args), value))
    if variant in weights.changes:
        args = weights.changes[variant](args)
    return eager(node.target)(*args, **node.kwargs)


def _finish(
    graph: Graph,
    tail: Sequence[fx.Node],
    held: Mapping[fx.Node, _Weights],
    env: Mapping[fx.Node, Mapping[Lane, Any]],
    variant: int,
    sequence: int,
) -> Tensor:
    known: dict[fx.Node, Mapping[Lane, Any]] = dict(env)
    for node in tail:
        if node.op == "call_function":
            known[node] = {(variant, sequence): _call(node, known, held[node], variant, sequence)}
    found = known[graph.output]
    return found[variant, sequence] if (variant, sequence) in found else found[MODEL, sequence]


def _needed(graph: Graph) -> list[fx.Node]:
    """The nodes that the first output depends on, in execution order."""
    wanted = {graph.output}
    for node in reversed(list(graph.nodes)):
        if node in wanted:
            wanted.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in wanted]


def _large(graph: Graph, order: Sequence[fx.Node]) -> int:
    """The index in `order` of the last linear layer, whose values are as wide as the vocabulary; for a graph that
    embeds, the end."""
    places = [i for i, node in enumerate(order) if node.op == "call_function" and node.target is _LINEAR]
    return places[-1] if places and not graph.embeds else len(order)
