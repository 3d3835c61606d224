"""Makes a score from the next token's logits: the logit of one token after a text, minus that of another if there is
one."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import UnsupportedModel
from ..graph.graph import Graph
from ..graph.tensor_types import type_of
from ..ops import OPS, traits_of
from ..weights.handles import Constant, derive
from .source.scoring import Words

_LINEAR, _VIEW = OPS["linear"].overload, torch.ops.aten.view.default


def score_words(graph: Graph, words: Words) -> None:
    """Replace a graph's output, logits [T, V], by scores [T, 1]. Only the words' rows of the head are kept.
    UnsupportedModel if an op between the head and the logits reads several tokens of the vocabulary.
    """
    tail = _behind_the_head(graph)
    head = tail.pop()
    x, weight, bias = (*head.args, None)[:3]
    tokens = [words.yes, *([] if words.no is None else [words.no])]
    if max(tokens) >= type_of(head).shape[-1] or min(tokens) < 0:
        raise UnsupportedModel(f"the tokens {tokens} of the score are not in the vocabulary")

    def rows(values: Tensor) -> Tensor:
        return values[tokens].contiguous()

    with graph.fx.inserting_before(graph.end):
        kept = [
            None if part is None else graph.add_weight(name, derive(rows, graph.weight(part)))  # type: ignore[arg-type]
            for name, part in (("words.weight", weight), ("words.bias", bias))
        ]
        node, before = graph.call(_LINEAR, x, *kept), head
        for old in reversed(tail):
            if old.target is not _VIEW:
                node = graph.call(old.target, *(node if a is before else a for a in old.args))  # type: ignore[arg-type]
            before = old
        node = graph.call(_VIEW, node, [-1, len(tokens)])
        if words.no is not None:
            less = graph.add_weight("words.difference", Constant(torch.tensor([[1.0, -1.0]])))
            node = graph.call(_LINEAR, node, less, None)
    graph.picked = "last"
    [name] = graph.outputs
    graph.returns(**{name: node})
    graph.sweep()


def _behind_the_head(graph: Graph) -> list[fx.Node]:
    """The nodes from the logits back to the product that makes them. UnsupportedModel if one of them is neither
    elementwise nor a view."""
    node, found = graph.output, [graph.output]
    while node.target is not _LINEAR:
        inputs: list[Any] = node.all_input_nodes
        own = [n for n in inputs if type_of(n).shape[-1:] == type_of(node).shape[-1:]]
        alike = (traits_of(node.target).elementwise or node.target is _VIEW) and len(own) == 1
        if not alike or any(prod(type_of(n).shape) != 1 for n in inputs if n is not own[0]):
            raise UnsupportedModel(
                "logits that are not computed one by one from a product: single tokens cannot be scored"
            )
        node = own[0]
        found.append(node)
    return found
