"""`--spec` at compile time: the engine's drafter, its heads, and its trees."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...passes.speculate.insert_draft_layer import DraftLayer
from ...runtime.format.manifest import Limits
from ...runtime.format.program import Program
from ...runtime.format.speculation import MAX_GUESSES, DraftTree, Speculation
from ..graph.graph import Graph
from .acceptance import DRAFTS, Progress, measure_acceptance
from .choice import SpecChoice
from .tree import Cost, choose_tree, tree_of

FEW = 15  # guesses of the step from which the cost of one guess is derived
SEQUENCES = 8  # sequences of the calibration text on which acceptance is measured


def speculation(
    choice: SpecChoice | None,
    acceptance: Sequence[Sequence[float]],
    limits: Limits,
    guesses: int | None,
    cost: Cost,
    layer: DraftLayer | None = None,
) -> Speculation | None:
    """The Speculation of program.json: the drafter, an estimate of the cost of a guess (in a mixture of experts mostly
    that of the experts it reads), and, for heads, one tree per power of two of requests. None without --spec.

    guesses: number of guesses of each tree; None: as many as pay. layer: the draft layer, or None.
    """
    if choice is None:
        return None
    slope = round(max(0.0, (cost(1, FEW) / cost(1, 0) - 1) / FEW), 4)
    if not acceptance:
        bare = Speculation(choice.drafter, slope=slope)
        return bare if layer is None else msgspec.structs.replace(bare, block=layer.block, mask_token=layer.mask_token)
    most = limits.max_batch_size
    trees: list[DraftTree] = []
    for batch in sorted({min(2**power, most) for power in range(most.bit_length() + 1)}):
        room = min(MAX_GUESSES, limits.max_step_tokens // batch - 1)
        if guesses is None:
            trees.append(choose_tree(acceptance, batch, cost, room))
        else:
            trees.append(tree_of(acceptance, batch, cost, min(guesses, room)))
    rates = [list(head) for head in acceptance]
    return Speculation(choice.drafter, len(rates), len(rates[0]), rates, trees, slope)


def with_speculation(program: Program, found: Speculation | None) -> Program:
    """The program with this speculation; unchanged for None."""
    return program if found is None else msgspec.structs.replace(program, speculation=found)


def acceptance_of(graph: Graph, sequences: Sequence[Sequence[int]], progress: Progress) -> list[list[float]]:
    """The measured acceptance; [] if the graph has no heads."""
    return measure_acceptance(graph, sequences[:SEQUENCES], progress) if DRAFTS in graph.sections else []
