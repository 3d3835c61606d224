"""Medusa heads: guesses of the tokens after the next, from the hidden state that the LM head reads (Cai et al. 2024).

Head i is a chain of blocks x + silu(linear(x)) and an LM head, its own or the model's. Besides the logits the graph
gives each head's likeliest tokens, best first: section "medusa" with its drafts [T, heads, ranks].
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import fx

from ...compiler.errors import HeadMismatch, PassError
from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import Graph
from ...compiler.graph.tensor_types import type_of
from ...compiler.ops import OPS
from ...compiler.weights.handles import Weight
from ..base import Pass, PassContext, PassResult
from ..quantize.select import lm_heads

aten = torch.ops.aten
LINEAR, TOPK = OPS["linear"].overload, OPS["topk"].overload
SECTION, PREFIX = "medusa", "medusa_head"
RANKS = 8  # tokens that each head names


class Head(Protocol):
    """Weight [hidden, hidden] and bias [hidden] of each block; the head's own LM head [vocab, hidden], or a projection
    [hidden, hidden] in front of the model's, if any."""

    @property
    def blocks(self) -> tuple[tuple[Weight, Weight], ...]:
        """Weight [hidden, hidden] and bias [hidden] of each residual block."""
        ...

    @property
    def lm_head(self) -> Weight | None:
        """The head's own LM head [vocab, hidden]; None if it uses the model's."""
        ...

    @property
    def projection(self) -> Weight | None:
        """A projection [hidden, hidden] in front of the model's LM head; None for none."""
        ...


@dataclass(frozen=True)
class InsertMedusaHeads(Pass):
    """Inserts `heads`; each gives its `ranks` likeliest tokens. Raises HeadMismatch if they were made for another
    model."""

    heads: Sequence[Head] = ()
    ranks: int = RANKS
    name: ClassVar[str] = "insert-medusa-heads"
    breaks: ClassVar[frozenset[str]] = frozenset({Fact.UNIQUE})

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        if SECTION in graph.sections or not self.heads:
            return PassResult(False)
        found = lm_heads(graph)
        if len(found) != 1:
            raise PassError(f"pass {self.name!r}: the logits come from {len(found)} linear layers, heads need one")
        [lm_head] = found
        if type_of(lm_head).shape[:-1].count(1) < len(type_of(lm_head).shape) - 1:
            raise PassError(f"pass {self.name!r}: the LM head sees several vectors per token")
        self._check(lm_head)
        with graph.fx.inserting_before(graph.end):
            choices = [self._head(graph, lm_head, number, head) for number, head in enumerate(self.heads)]
            together = graph.call(aten.cat.default, choices, 1, origin=lm_head)
            shape = [-1, len(choices), type_of(together).shape[0] // len(choices)]
            drafts = graph.call(aten.view.default, together, shape, origin=lm_head)
        graph.returns(**{f"{SECTION}.drafts": drafts})
        return PassResult(True, Counter({"medusa-heads": len(self.heads)}))

    def _check(self, lm_head: fx.Node) -> None:
        vocab, hidden = type_of(lm_head.args[1]).shape  # type: ignore[arg-type]
        for number, head in enumerate(self.heads):
            for layer, (weight, _) in enumerate(head.blocks):
                if weight.shape != (hidden, hidden):
                    raise HeadMismatch(
                        f"{PREFIX}.{number}.{layer}.linear.weight", "hidden size", weight.shape[-1], hidden
                    )
            if head.projection is not None and head.projection.shape != (hidden, hidden):
                name = f"{PREFIX}.{number}.projection.weight"
                raise HeadMismatch(name, "hidden size", head.projection.shape[-1], hidden)
            if head.lm_head is not None and head.lm_head.shape != (vocab, hidden):
                name, (rows, width) = f"{PREFIX}.{number}.{len(head.blocks)}.weight", head.lm_head.shape
                what = ("vocabulary", rows, vocab) if rows != vocab else ("hidden size", width, hidden)
                raise HeadMismatch(name, *what)

    def _head(self, graph: Graph, lm_head: fx.Node, number: int, head: Head) -> fx.Node:
        """int64 [T, ranks]: the head's choices."""
        x = lm_head.args[0]
        for layer, (weight, bias) in enumerate(head.blocks):
            name = f"{PREFIX}.{number}.{layer}.linear"
            nodes = graph.add_weight(f"{name}.weight", weight), graph.add_weight(f"{name}.bias", bias)
            inner = graph.call(LINEAR, x, *nodes)
            gate = graph.call(aten.sigmoid.default, inner)
            x = graph.call(aten.add.Tensor, x, graph.call(aten.mul.Tensor, inner, gate))
        own = head.lm_head
        if own is None:
            if head.projection is not None:
                projection = graph.add_weight(f"{PREFIX}.{number}.projection.weight", head.projection)
                x = graph.call(LINEAR, x, projection, None)
            shared = lm_head.args[1]
            assert isinstance(shared, fx.Node)
            weight = graph.add_weight(str(shared.target), graph.weight(shared))
        else:
            weight = graph.add_weight(f"{PREFIX}.{number}.{len(head.blocks)}.weight", own)
        logits = graph.call(LINEAR, x, weight, None)
        best = graph.call(TOPK, logits, min(self.ranks, type_of(logits).shape[-1]), True)
        chosen = graph.call(operator.getitem, best, 1)
        shape = type_of(chosen).shape  # (ranks,), after axes of size 1 if the model keeps any
        return chosen if len(shape) == 1 else graph.call(aten.view.default, chosen, [-1, shape[-1]])
