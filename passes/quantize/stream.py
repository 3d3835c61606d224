"""The reference interpreter over many sequences at once, layer by layer, for calibration.

Each node runs for every sequence before the next node does, so that a weight is loaded once, a pass can replace it
right before it is used, and later layers see what the layers before them are by then. Values go after their last use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...compiler.graph.graph import Graph
from ...compiler.graph.interpret import as_compute, eager

Inputs = dict[fx.Node, list[Any]]
Visit = Callable[[fx.Node, Inputs], None]


def _needed(graph: Graph, wanted: Collection[fx.Node]) -> list[fx.Node]:
    """The nodes that `wanted` depends on, and `wanted`, in execution order."""
    found: set[fx.Node] = set(wanted)
    for node in reversed(list(graph.nodes)):
        if node in found:
            found.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in found]


@torch.no_grad()
def stream(graph: Graph, sequences: Sequence[Sequence[int]], wanted: Collection[fx.Node], visit: Visit) -> None:
    """Call `visit(node, inputs)` right before each node of `wanted` would run; `inputs` has a value per sequence.

    The run ends at the last wanted node, which does not run (LM head logits for all sequences are large).
    """
    remaining, env = set(wanted), Inputs()
    order = _needed(graph, remaining)
    last_use = {arg: node for node in order for arg in node.all_input_nodes}
    for node in order:
        if node.op == "placeholder":
            env[node] = [_placeholder(str(node.target), ids) for ids in sequences]
            continue
        if node.op != "call_function":
            continue
        if node in remaining:
            visit(node, {arg: env[arg] for arg in node.all_input_nodes if arg in env})
            remaining.discard(node)
            if not remaining:
                return
        weights = {a: as_compute(graph.weight(a).load()) for a in node.all_input_nodes if a.op == "get_attr"}
        env[node] = [_call(node, env, weights, i) for i in range(len(sequences))]
        for arg in node.all_input_nodes:
            if last_use[arg] is node:
                env.pop(arg, None)


def _placeholder(name: str, ids: Sequence[int]) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64) if name == "token_ids" else torch.arange(len(ids))


def _call(node: fx.Node, env: Inputs, weights: dict[fx.Node, Tensor], index: int) -> Any:
    args = fx.map_arg(node.args, lambda n: weights[n] if n in weights else env[n][index])
    return eager(node.target)(*args, **node.kwargs)
