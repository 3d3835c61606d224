"""Measures how often the heads are right, per head and rank, on calibration text with the reference interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..graph.graph import LOGITS, Graph
from ..graph.interpret import interpret_outputs

DRAFTS = "medusa"  # the section of draft heads, see passes/speculate/insert_medusa_heads.py
Progress = Callable[[str, int, int], None]


def measure_acceptance(graph: Graph, sequences: Sequence[Sequence[int]], progress: Progress) -> list[list[float]]:
    """acceptance[head][rank]: the share of positions where this choice of head i is the model's own greedy token i + 2
    positions later, among the positions where the text up to there is what the model would have written. Sorted to fall
    with the rank.
    """
    hits, counts = torch.zeros(0), torch.zeros(0)
    for number, tokens in enumerate(sequences):
        progress("acceptance of the heads", number, len(sequences))
        outputs = interpret_outputs(graph, tokens)
        logits, drafts = outputs[LOGITS], outputs[f"{DRAFTS}.drafts"]
        greedy = logits.argmax(-1)  # greedy[t] follows token t
        agrees = greedy[:-1] == torch.tensor(list(tokens[1:]))
        if not len(hits):
            hits, counts = torch.zeros(drafts.shape[1:]), torch.zeros(len(drafts[0]))
        for head in range(len(hits)):
            ahead = head + 1
            places = len(tokens) - ahead
            along = torch.stack([agrees[step : step + places] for step in range(ahead)]).all(0)
            right = drafts[:places, head] == greedy[ahead:, None]
            hits[head] += right[along].sum(0)
            counts[head] += along.sum()
    rates = hits / counts.clamp(min=1)[:, None]
    return [[round(float(rate), 4) for rate in head.sort(descending=True).values] for head in rates]
