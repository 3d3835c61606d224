"""The reference interpreter: runs a graph eagerly on one sequence, the oracle of every pass and backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from ..ops import op_of, traits_of
from ..ops.collective import across
from ..weights.shards import LastParts, of_rank
from .graph import HIDDEN, LOGITS, Graph
from .tensor_types import DRAFT_ROWS, LOGIT_ROWS, TOKENS, input_type


def as_compute(value: Tensor) -> Tensor:
    """The value in the type in which it computes: float32 for floats of any type and shape; integers and booleans
    unchanged."""
    return value.to(torch.float32) if value.is_floating_point() else value


def eager(target: Any) -> Callable[..., Any]:
    """The function that computes a node's target on tensors of any strides."""
    op = op_of(target)
    return op.reference if op is not None and op.traits.moves_only else target


Observer = Callable[[fx.Node, tuple[Any, ...]], None]


def input_values(
    graph: Graph,
    token_ids: Sequence[int],
    logit_rows: Sequence[int] | None = None,
    extras: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """The values of the placeholders for one sequence, by name. logit_rows: None for all tokens. extras: rows [T, ...]
    of declared inputs, or one row per logit row for inputs of sections; other inputs get their fill values."""
    count = len(token_ids)
    rows = torch.arange(count) if logit_rows is None else torch.tensor(list(logit_rows))
    values = {"token_ids": torch.tensor(list(token_ids), dtype=torch.int64), "positions": torch.arange(count)}
    values |= {LOGIT_ROWS: rows, DRAFT_ROWS: torch.arange(len(rows))}
    for array in graph.declared:
        kind = input_type(array)
        filled = torch.full((count if kind.rows == TOKENS else len(rows), *kind.shape), array.fill, dtype=kind.dtype)
        values[array.name] = extras[array.name].to(kind.dtype) if array.name in extras else filled
    return values


@torch.no_grad()
def interpret(
    graph: Graph,
    token_ids: Sequence[int],
    logit_rows: Sequence[int] | None = None,
    observer: Observer | None = None,
    extras: Mapping[str, Tensor] = MappingProxyType({}),
) -> Tensor:
    """Logits float32 [T or L, vocab] of one sequence that starts at position 0.

    `observer(node, args)` sees each call's evaluated arguments before it runs. logit_rows: the L rows that are wanted;
    None: all T. extras: rows [T, ...] of declared inputs, by name; other inputs get their fill values.
    """
    found = _run(graph, input_values(graph, token_ids, logit_rows, extras), observer)
    return found[HIDDEN if HIDDEN in found else LOGITS]


@torch.no_grad()
def interpret_outputs(
    graph: Graph, token_ids: Sequence[int], extras: Mapping[str, Tensor] = MappingProxyType({})
) -> dict[str, Tensor]:
    """All outputs of a graph for one sequence that starts at position 0, by the names of `Graph.outputs`, with a row
    for each token; sections run for all tokens. extras: see `interpret`."""
    return _run(graph, input_values(graph, token_ids, None, extras), None)


def _run(graph: Graph, inputs: Mapping[str, Tensor], observer: Observer | None = None) -> dict[str, Tensor]:
    """The outputs by name, as rank 0 computes them, or the first rank of the last stage. All ranks run in lockstep,
    call by call."""
    env: dict[fx.Node, list[Any]] = {}
    last_use = {arg: node for node in graph.nodes for arg in node.all_input_nodes}
    ranks, last = range(graph.ranks), LastParts()
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = [inputs[str(node.target)]] * graph.ranks
        elif node.op == "get_attr":
            continue  # loaded at its use, so that only one weight at a time is in memory
        elif node.op == "output":
            own = (graph.stages - 1) * graph.parts  # those of rank 0, or of the first rank of the last stage
            return {name: _value(arg, graph, env, own, last) for name, arg in graph.outputs.items()}
        else:
            env[node] = _call(graph, node, env, ranks, last, observer)
        for arg in node.all_input_nodes:
            if last_use[arg] is node:
                env.pop(arg, None)
    raise AssertionError("a graph ends with an output node")


def _call(
    graph: Graph,
    node: fx.Node,
    env: Mapping[fx.Node, list[Any]],
    ranks: range,
    last: LastParts,
    observer: Observer | None,
) -> list[Any]:
    """The value of a call on each rank."""
    args = [tuple(_value(a, graph, env, rank, last) for a in node.args) for rank in ranks]
    if observer is not None:
        observer(node, args[0])
    if traits_of(node.target).collective:
        return list(across(node.target, args, graph.parts))
    return [eager(node.target)(*own, **node.kwargs) for own in args]


def _value(arg: Any, graph: Graph, env: Mapping[fx.Node, list[Any]], rank: int, last: LastParts) -> Any:
    if isinstance(arg, fx.Node):
        part = rank % graph.parts
        return as_compute(of_rank(graph.weight(arg), part, last).load()) if arg.op == "get_attr" else env[arg][rank]
    if isinstance(arg, (list, tuple)):
        return [_value(a, graph, env, rank, last) for a in arg]
    return arg
