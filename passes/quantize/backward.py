"""Gradients over many sequences, a few layers at a time, for calibration.

The model runs forward once, and only the values between two segments of the graph are kept for every sequence (gradient
checkpointing, Chen et al. 2016, arXiv:1604.06174). Then each segment, the last one first, runs again and computes its
gradients. A segment is about half a transformer layer, so that memory does not grow with the model's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from ...compiler.graph.graph import Graph
from ...compiler.graph.interpret import as_compute, input_values
from ...compiler.graph.tensor_types import TensorType
from .forward import fast
from .stream import needed

Values = dict[fx.Node, Any]
"""The values of a segment's nodes, and of earlier nodes that it reads, for one sequence."""
Visit = Callable[[fx.Node, Values, Tensor], None]
_NARROW = 1.25  # values between segments may be this many times the least between any two calls
_FORWARD, _BACKWARD = 1, 3  # approximate costs of a segment: one run; another run plus twice the products


@dataclass(frozen=True)
class _Segment:
    """Calls in a row, and the values from before them that are needed here or later."""

    calls: list[fx.Node]
    given: list[fx.Node]

    def weights(self, graph: Graph) -> dict[fx.Node, Tensor]:
        """The weights that the segment's calls read, in float32."""
        names = {arg for call in self.calls for arg in call.all_input_nodes if arg.op == "get_attr"}
        return {name: as_compute(graph.weight(name).load()) for name in names}

    @property
    def cost(self) -> int:
        """How many elements of weights the segment's calls read."""
        reads = (arg for call in self.calls for arg in call.all_input_nodes if arg.op == "get_attr")
        return sum(prod(arg.meta["type"].shape) for arg in reads)


@torch.no_grad()
def backward(
    graph: Graph,
    sequences: Sequence[Sequence[int]],
    wanted: Collection[fx.Node],
    visit: Visit,
    left: Callable[[fx.Node], None],
    heard: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Call `visit(node, values, gradient)` of each node of `wanted` and each sequence, and `left(node)` when a node was
    visited for all of them. values has the node's inputs.

    The gradient, with the shape of the node's value, is that of the log-likelihood of tokens drawn from the model's own
    predictions, the same tokens in each run. The mean of its outer products is the Fisher information, the second
    derivative of the KL divergence of the predictions. A graph that embeds has squared errors of its hidden states
    instead, each row relative to its own mean square. heard: called with the work done and the total work.
    """
    calls = [node for node in needed(graph, [graph.output]) if node.op == "call_function"]
    wanted = set(wanted)
    segments, moved = _segments(graph, calls, wanted), _behind(calls, wanted)
    costs = [segment.cost for segment in segments]
    total, done = max(1, (_FORWARD + _BACKWARD) * sum(costs) - _FORWARD * costs[-1]), 0
    between: list[list[Values]] = [_given(graph, sequences, segments[0])]
    for segment, following in pairwise(segments):
        weights = segment.weights(graph)
        between.append([_forward(segment, values, weights, following) for values in between[-1]])
        done += _FORWARD * segment.cost
        heard(done, total)
    source = torch.Generator().manual_seed(0)
    pulls: list[dict[fx.Node, Tensor]] | None = None
    for segment in reversed(segments):
        weights, inside = segment.weights(graph), [node for node in segment.calls if node in wanted]
        found = []
        for number, values in enumerate(between.pop()):
            leaves = {n: v.detach().requires_grad_() for n, v in values.items() if n in moved and v.is_floating_point()}
            env = _traced(segment, {**values, **leaves}, weights, inside)
            pull = {graph.output: _drawn(env[graph.output], graph, source)} if pulls is None else pulls[number]
            found.append(_pulled(env, leaves, pull))
            for node in inside:
                if env[node].grad is not None:
                    visit(node, env, env[node].grad)
        pulls = found
        for node in inside:
            left(node)
        done += _BACKWARD * segment.cost
        heard(done, total)


def _given(graph: Graph, sequences: Sequence[Sequence[int]], first: _Segment) -> list[Values]:
    """The placeholders' values, for each sequence."""
    inputs = [input_values(graph, ids) for ids in sequences]
    return [{node: given[str(node.target)] for node in first.given} for given in inputs]


def _call(node: fx.Node, env: Values, weights: Mapping[fx.Node, Tensor]) -> Any:
    args = fx.map_arg(node.args, lambda n: weights[n] if n in weights else env[n])
    return fast(node.target)(*args, **node.kwargs)


def _forward(segment: _Segment, values: Values, weights: Mapping[fx.Node, Tensor], following: _Segment) -> Values:
    env = dict(values)
    for node in segment.calls:
        env[node] = _call(node, env, weights)
    return {node: env[node] for node in following.given}


@torch.enable_grad()
def _traced(segment: _Segment, env: Values, weights: Mapping[fx.Node, Tensor], wanted: Sequence[fx.Node]) -> Values:
    """The values of a segment's nodes, from which gradients flow back to `wanted` and to the segment's inputs."""
    for node in segment.calls:
        env[node] = _call(node, env, weights)
        if node in wanted:
            if env[node].requires_grad:
                env[node].retain_grad()
            else:
                env[node].requires_grad_()
    return env


def _pulled(env: Values, leaves: Mapping[fx.Node, Tensor], pull: dict[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
    """The gradients of a segment's inputs, from those of its outputs, `pull`."""
    roots = [node for node in pull if node not in leaves and env[node].requires_grad]
    if roots:
        torch.autograd.backward([env[node] for node in roots], [pull[node] for node in roots])
    found = {}
    for node, leaf in leaves.items():
        own, later = leaf.grad, pull.get(node)  # a value that passes through has both
        if own is not None or later is not None:
            found[node] = own + later if own is not None and later is not None else own if later is None else later
    return found


def _drawn(outputs: Tensor, graph: Graph, source: torch.Generator) -> Tensor:
    """The gradient of the log-likelihood of a token drawn for each row of logits [T, vocab]; see `backward` for hidden
    states."""
    if graph.embeds:
        scale = outputs.square().mean(-1, keepdim=True).clamp(min=1e-30).rsqrt()
        return torch.randn(outputs.shape, generator=source) * scale
    chances = torch.softmax(outputs, -1)
    tokens = torch.multinomial(chances, 1, generator=source)
    return chances.neg_().scatter_add_(-1, tokens, torch.ones_like(tokens, dtype=chances.dtype))


def _segments(graph: Graph, calls: Sequence[fx.Node], wanted: Collection[fx.Node]) -> list[_Segment]:
    """Cut where few values lie between two calls, such as between residual additions; each segment has at least one
    wanted node."""
    last = {arg: place for place, call in enumerate(calls) for arg in call.all_input_nodes}
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node in last]
    sizes, places = _sizes(calls, last, inputs), [i for i, call in enumerate(calls) if call in wanted]
    inner = [sizes[at] for at in range(places[0] + 1, places[-1] + 1)] if places else []
    most = _NARROW * min(inner, default=0.0)
    starts = [0]
    for at in range(1, len(calls)):
        if sizes[at] <= most < float("inf") and any(starts[-1] <= place < at for place in places):
            starts.append(at)
    found = []
    for start, end in pairwise([*starts, len(calls)]):
        given = [node for node in (*inputs, *calls[:start]) if last.get(node, -1) >= start]
        found.append(_Segment(list(calls[start:end]), given))
    return found


def _sizes(calls: Sequence[fx.Node], last: Mapping[fx.Node, int], inputs: Sequence[fx.Node]) -> list[float]:
    """Numbers per token that are alive before each call; infinite if one of the values is several tensors."""
    sizes, live = [], dict.fromkeys(inputs)
    for place, call in enumerate(calls):
        sizes.append(float(sum(_size(node) for node in live)))
        live[call] = None
        live = {node: None for node in live if last.get(node, -1) > place}
    return sizes


def _size(node: fx.Node) -> float:
    kind = node.meta["type"]
    if not isinstance(kind, TensorType):
        return float("inf")
    return 0.0 if kind.rows is None else prod(kind.shape)


def _behind(calls: Sequence[fx.Node], wanted: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes whose values depend on those of `wanted`, and `wanted`."""
    found = set(wanted)
    for call in calls:
        if any(arg in found for arg in call.all_input_nodes):
            found.add(call)
    return found
