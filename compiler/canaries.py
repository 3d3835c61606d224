"""Canary prompts: the answers that an engine must give on any machine, computed by the reference interpreter from the
stored weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..runtime.format.canaries import Canaries, Canary
from .calibration import tokenize
from .graph.graph import Graph
from .graph.together import logits_of
from .kv_formats import find_kv_format

# Texts similar to some that any model has seen: its answers are then sharp, and correct kernels agree well.
TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome. One of them is",
    "def add(first, second):\n    return first + second\n\n\ndef multiply(first, second):\n",
)
TOKENS = 16  # length of a prompt
POSITIONS = 4
IDS = 32  # logits kept per position: half of them the most likely, half spread over all others
ALLOWED = 0.1
"""See Canaries. Correct kernels were off by 0.0002 (float32) to 0.014 (8-bit activations). In a model of six layers,
setting half of one weight to zero gave 0.16 to 1.1, and flipping a sixteenth of its codes 0.04 to 0.14."""


def make_canaries(graph: Graph, tokenizer: Path | None, kept: Sequence[str]) -> Canaries:
    """The canaries of a graph that has its final, stored weights. kept: the KV formats of its caches. tokenizer: the
    model's tokenizer.json; None if it has none: the prompts are then random tokens."""
    prompts = [_fitted(graph, ids) for ids in _prompts(graph, tokenizer)]
    found = [_canary(ids, rows) for ids, rows in zip(prompts, logits_of(graph, prompts), strict=True)]
    return Canaries(ALLOWED + max(find_kv_format(kind).tolerance for kind in kept), found)


def _prompts(graph: Graph, tokenizer: Path | None) -> list[list[int]]:
    if tokenizer is not None:
        found = [tokenize(text, tokenizer) for text in TEXTS]
        if all(len(ids) >= POSITIONS for ids in found):
            return found
    source = random.Random(0)
    return [[source.randrange(graph.info.vocab_size) for _ in range(TOKENS)] for _ in TEXTS]


def _fitted(graph: Graph, ids: Sequence[int]) -> list[int]:
    known = [token for token in ids if token < graph.info.vocab_size]
    return known[: min(TOKENS, graph.max_seq_len)]


def _canary(tokens: list[int], rows: Tensor) -> Canary:
    count = len(tokens)
    positions = sorted({(i + 1) * count // POSITIONS - 1 for i in range(POSITIONS)} - {-1})
    ids: list[list[int]] = []
    for at in positions:
        order = torch.argsort(rows[at], descending=True, stable=True)
        best, rest = order[: IDS // 2], order[IDS // 2 :]
        spread = rest[torch.linspace(0, len(rest) - 1, min(IDS // 2, len(rest))).long()] if len(rest) else rest
        ids.append(sorted(torch.cat([best, spread]).tolist()))
    logits = [[_rounded(value) for value in rows[at][own].tolist()] for at, own in zip(positions, ids, strict=True)]
    return Canary(tokens, positions, ids, logits)


def _rounded(value: float) -> float:
    """Round to four digits, which are enough."""
    return float(f"{value:.4g}")
