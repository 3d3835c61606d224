"""A model whose vocabulary an adapter has resized: its tables and LM head have other numbers of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from ..passes.quantize.select import lm_heads, plain_name, retype
from ..runtime.errors import AdapterError
from .frontend.source.facts import token_lookups
from .graph.graph import Graph
from .graph.tensor_types import type_of

VIEW = torch.ops.aten.view.default


def has_vocabulary(graph: Graph, readers: Iterable[fx.Node]) -> bool:
    """Whether the rows of a weight are tokens, judged by the calls that read it or its transpose: lookups in a table,
    or the LM head."""
    known = {*token_lookups(graph), *lm_heads(graph)}
    return all(user in known or (len(user.all_input_nodes) == 1 and known.intersection(user.users)) for user in readers)


def settle_vocabulary(graph: Graph, given: Mapping[str, tuple[int, ...]]) -> None:
    """Set a graph's vocabulary to that of its resized weights [vocabulary, width], and infer its types again. given:
    the shapes of these weights before, by their names in the graph.

    AdapterError if another table, or the LM head, has another number of rows because it was not in the adapter.
    """
    if not given:
        return
    name, (before, *_) = next(iter(given.items()))
    size = graph.weights[name].shape[0]
    for node in (*token_lookups(graph), *lm_heads(graph)):
        weight: Any = node.args[1]
        if weight.op == "get_attr" and graph.weight(weight).shape[0] != size:
            raise AdapterError(
                f"{name} of the adapter has {size} rows, {plain_name(weight)} has {graph.weight(weight).shape[0]}",
                "save it again with peft's save_pretrained(.., save_embedding_layers=True)",
            )
    _resize_views(graph, before, size)
    try:
        retype(graph)
    except RuntimeError as error:
        raise AdapterError(f"{name} of the adapter has {size} rows; the model's code is of {before} only") from error
    if not graph.embeds and type_of(graph.output).shape[-1] != size:
        raise AdapterError(f"{name} of the adapter has {size} rows, and logits are {before} wide")
    more = sum(prod(graph.weights[own].shape) - prod(before) for own, before in given.items())
    graph.info = replace(graph.info, vocab_size=size, num_parameters=graph.info.num_parameters + more)


def _resize_views(graph: Graph, before: int, after: int) -> None:
    """Make views of logits as wide as the new vocabulary."""
    behind = lm_heads(graph)
    for node in graph.nodes:
        if behind.intersection(node.all_input_nodes):
            behind.add(node)
            if node.target is VIEW:
                node.update_arg(1, [after if size == before else size for size in node.args[1]])  # type: ignore[union-attr]
