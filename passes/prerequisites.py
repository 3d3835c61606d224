"""Finds the passes that ensure the facts another pass requires: for `icc opt`, which may get a partial pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from ..compiler.errors import PassError
from ..compiler.graph.facts import CHECKS, problem
from ..compiler.graph.graph import Graph
from . import pipelines
from .base import Pass
from .manager import check_order


def facts_of(graph: Graph) -> frozenset[str]:
    """The facts that are true of the graph: those that passes ensured, and those that a check confirms."""
    return frozenset(graph.facts) | {fact for fact in CHECKS if not problem(graph, fact)}


def prerequisites(graph: Graph, item: Pass) -> list[Pass]:
    """The passes of the compile, in its order, that ensure facts which `item` requires and the graph lacks.

    Empty if the graph has these facts, or no pass of the compile ensures them.
    """
    facts = facts_of(graph)
    if item.requires <= facts:
        return []
    pipeline = [*pipelines.canonicalize(), *pipelines.attention(), *pipelines.fuse()]
    for end in range(1, len(pipeline) + 1):
        if _ensures(pipeline[:end], item, facts):
            return _fewest(pipeline[:end], item, facts)
    return []


def _ensures(passes: Sequence[Pass], item: Pass, facts: frozenset[str]) -> bool:
    """Whether `item` may run after `passes`, on a graph with these facts."""
    try:
        check_order([*passes, item], facts)
    except PassError:
        return False
    return True


def _fewest(passes: list[Pass], item: Pass, facts: frozenset[str]) -> list[Pass]:
    """`passes` without those that `item` does not need."""
    for number in reversed(range(len(passes))):
        left = passes[:number] + passes[number + 1 :]
        if _ensures(left, item, facts):
            passes = left
    return passes
