"""The float model over many sequences at once, layer by layer, for calibration.

Each node runs for every sequence before the next node runs, so that a weight is loaded once, a pass can replace it
right before it is used, and later layers see the replaced layers before them. Values are freed after their last use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ...compiler.graph.graph import Graph
from ...compiler.graph.interpret import as_compute, input_values
from .forward import fast
from .store import NOWHERE, PassStore, Values

Inputs = dict[fx.Node, list[Any]]
Visit = Callable[[fx.Node, Inputs], None]


def needed(graph: Graph, wanted: Collection[fx.Node]) -> list[fx.Node]:
    """The nodes that `wanted` depends on, and `wanted`, in execution order."""
    found: set[fx.Node] = set(wanted)
    for node in reversed(list(graph.nodes)):
        if node in found:
            found.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in found]


@torch.no_grad()
def stream(
    graph: Graph,
    sequences: Sequence[Sequence[int]],
    wanted: Collection[fx.Node],
    visit: Visit,
    device: str = "cpu",
    store: PassStore = NOWHERE,
) -> None:
    """Call `visit(node, inputs)` right before each node of `wanted` would run; `inputs` has a value per sequence.

    The run ends at the last wanted node, which does not run (LM head logits for all sequences are large). device:
    torch's name of the device for values; weights are decoded on the CPU and moved there one at a time. store: where
    values are saved from time to time, right before a wanted node; the run begins at saved values if no wanted node
    precedes them.
    """
    remaining, env = set(wanted), Inputs()
    inputs = [input_values(graph, ids) for ids in sequences]
    order = needed(graph, remaining)
    last_use = {arg: node for node in order for arg in node.all_input_nodes}
    order = _resume(order, remaining, store, env, device)
    for node in order:
        if node.op == "placeholder":
            env[node] = [given[str(node.target)].to(device) for given in inputs]
            continue
        if node.op != "call_function":
            continue
        if node in remaining:
            store.keep_values(node.name, partial(_live, env))
            visit(node, {arg: env[arg] for arg in node.all_input_nodes if arg in env})
            remaining.discard(node)
            if not remaining:
                return
        gets = [a for a in node.all_input_nodes if a.op == "get_attr"]
        weights = {a: as_compute(graph.weight(a).load()).to(device) for a in gets}
        with on(device):
            env[node] = [_call(node, env, weights, i) for i in range(len(sequences))]
        for arg in node.all_input_nodes:
            if last_use[arg] is node:
                env.pop(arg, None)


def _resume(
    order: list[fx.Node], wanted: Collection[fx.Node], store: PassStore, env: Inputs, device: str
) -> list[fx.Node]:
    """The rest of `order` after stored values, which are put into `env`; all of `order` if there are none."""
    found = store.values()
    places = {node.name: number for number, node in enumerate(order)}
    if found is None or found[0] not in places:
        return order
    start, values = places[found[0]], found[1]
    if any(node in wanted for node in order[:start]):
        return order
    for name, kept in values.items():
        if name in places:  # values that nothing needs any more are left out
            env[order[places[name]]] = [value.to(device) for value in kept]
    return order[start:]


def _live(env: Inputs) -> Values | None:
    """The values in the form that a store keeps; None if one is not a tensor."""
    if not all(isinstance(value, Tensor) and value.dim() for values in env.values() for value in values):
        return None
    return {node.name: values for node, values in env.items()}


def on(device: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which tensors are created on that device."""
    return contextlib.nullcontext() if device == "cpu" else torch.device(device)


def _call(node: fx.Node, env: Inputs, weights: dict[fx.Node, Tensor], index: int) -> Any:
    args = fx.map_arg(node.args, lambda n: weights[n] if n in weights else env[n][index])
    return fast(node.target)(*args, **node.kwargs)
