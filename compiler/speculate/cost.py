"""What a step costs by its tokens, by the roofline on a target: how large a tree of guesses pays."""

from __future__ import annotations

from torch import fx

from ..graph.graph import Graph
from ..graph.tensor_types import DRAFT_ROWS, LOGIT_ROWS, TOKENS
from ..program.profile import Profile
from ..report import node_cost
from ..targets import Target
from ..weights.handles import QuantizedWeight
from .tree import Cost

EFFICIENCY = 0.6  # of the peak rate that products reach
LAUNCH = {"cpu": 1.5e-6, "cuda": 3e-6, "hip": 5e-6}  # seconds per kernel, barrier included
HOST = 1e-4  # seconds of a step outside of the kernels


def modelled_cost(graph: Graph, target: Target, profile: Profile, drafts: str) -> Cost:
    """By the roofline of every op, plus what each launch and each step takes beside it. drafts: the section that
    guesses, where the graph has it."""
    quantized = any(isinstance(weight, QuantizedWeight) for weight in graph.weights.values())
    roof = target.roofline(eight=quantized, share=EFFICIENCY)
    asked = graph.section_nodes()
    step = {node for node in graph.nodes if node not in asked}
    guessing = graph.section_nodes(drafts) if drafts in graph.sections else set()

    def seconds(nodes: set[fx.Node], tokens: int) -> float:
        total, counts = 0.0, {TOKENS: tokens, LOGIT_ROWS: tokens, DRAFT_ROWS: tokens}
        for node in graph.nodes:
            cost = node_cost(graph, node, counts, profile) if node in nodes else None
            if cost is not None:
                total += roof.seconds(cost.bytes, cost.flops) + LAUNCH[target.backend]
        return total

    def cost(batch: int, guesses: int) -> float:
        return HOST + seconds(step, batch * (1 + guesses)) + (seconds(guessing, batch) if guesses else 0.0)

    return cost
