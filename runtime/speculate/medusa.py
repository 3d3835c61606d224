"""Medusa heads in the engine: their choices after a step's newest token fill the static tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..batch.scheduled import Draft
from ..executor.base import SectionExecutor
from ..format.program import ASKED_ROWS
from ..format.speculation import DraftTree, Speculation
from .drafter import Drafter, Proposal, Wish

SECTION = "medusa"  # the section of a program's draft heads; its output is "drafts" [rows, heads, ranks], best first


class MedusaDrafter(Drafter):
    """Fills the tree that the compiler chose for the batch size; does not draft if the compiler expects that drafting
    is slower."""

    name, observes = "medusa", True

    def __init__(self, executor: SectionExecutor, speculation: Speculation) -> None:
        self._executor, self._speculation = executor, speculation
        self._drafts: dict[int, tuple[DraftTree, np.ndarray]] = {}
        tree = speculation.tree(1)
        chances = [] if tree is None else zip(tree.chances, tree.depths, strict=True)
        # the rate of the first guess and its siblings, on the calibration text
        self.first_rate = sum(chance for chance, depth in chances if depth == 1) if tree is not None else 1.0

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        found: dict[int, Proposal] = {}
        for wish in wishes:
            request_id = wish.generation.request_id
            if request_id in self._drafts:
                tree, choices = self._drafts.pop(request_id)
                tokens = tuple(choices[tree.gather].tolist())
                factor = wish.rate / self.first_rate
                chances = [chance * factor**depth for chance, depth in zip(tree.chances, tree.depths, strict=True)]
                found[request_id] = Proposal(Draft(tokens, tuple(tree.parents)), tuple(chances))
        return found

    def observe(self, rows: Mapping[int, int], batch_size: int) -> None:
        self._drafts.clear()
        tree = self._speculation.tree(batch_size)
        if tree is not None and rows:
            asked = {ASKED_ROWS: np.array(list(rows.values()), np.int32)}
            choices = self._executor.run(SECTION, asked)["drafts"].reshape(len(rows), -1)
            self._drafts = {request_id: (tree, own) for request_id, own in zip(rows, choices, strict=True)}

    def forget(self, request_id: int) -> None:
        self._drafts.pop(request_id, None)

    def close(self) -> None:
        self._drafts.clear()
