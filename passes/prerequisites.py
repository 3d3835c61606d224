"""Which passes make true what another one requires: for `icc opt`, where nobody has listed a whole pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from ..compiler.errors import PassError
from ..compiler.graph.facts import CHECKS, problem
from ..compiler.graph.graph import Graph
from . import pipelines
from .base import Pass
from .manager import check_order


def facts_of(graph: Graph) -> frozenset[str]:
    """What is true of the graph: facts that passes ensured, and those that show in it."""
    return frozenset(graph.facts) | {fact for fact in CHECKS if not problem(graph, fact)}


def prerequisites(graph: Graph, item: Pass) -> list[Pass]:
    """The passes of the compile, in its order, that ensure what `item` requires and the graph does not have.

    Empty where the graph has it, or no pass of the compile ensures it.
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
    """Whether `item` may run behind `passes`, on a graph of which `facts` are true."""
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
