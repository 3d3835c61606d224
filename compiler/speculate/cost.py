"""Models the time of a step by its number of tokens, by the roofline of a target, to decide how large a tree of guesses
pays."""

from __future__ import annotations

from torch import fx

from ..graph.graph import Graph
from ..graph.tensor_types import DRAFT_ROWS, LOGIT_ROWS, TOKENS
from ..program.profile import Profile
from ..report import node_cost
from ..targets import Target
from ..weights.handles import QuantizedWeight
from .tree import Cost

EFFICIENCY = 0.6  # share of the peak rate that products reach
LAUNCH = {"cpu": 1.5e-6, "cuda": 3e-6, "hip": 5e-6}  # seconds per kernel, including its barrier
HOST = 1e-4  # seconds of a step outside the kernels


def modelled_cost(graph: Graph, target: Target, profile: Profile, drafts: str) -> Cost:
    """The cost of a step in seconds: the roofline of every op, plus a constant per launch and per step. drafts: the
    name of the section that guesses, if the graph has one."""
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
