"""The tree at compile time: the likeliest guesses, as many as pay, and none if they do not pay."""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import pytest
import torch
from icc.compiler.errors import UsageError
from icc.compiler.graph.graph import Graph
from icc.compiler.ops.linear import expert_linear, linear
from icc.compiler.speculate import acceptance
from icc.compiler.speculate.acceptance import measure_acceptance
from icc.compiler.speculate.plan import SpecChoice, speculation
from icc.compiler.speculate.tree import choose_tree, likeliest_paths
from icc.runtime.format.manifest import Limits

RATES = [[0.6, 0.2, 0.05], [0.5, 0.3, 0.1], [0.4, 0.1, 0.0]]


def test_the_likeliest_paths_are_found_parents_first() -> None:
    every = {
        path: prod(RATES[head][rank] for head, rank in enumerate(path))
        for depth in (1, 2, 3)
        for path in itertools.product(range(3), repeat=depth)
    }
    best = sorted(every.values(), reverse=True)
    found = likeliest_paths(RATES, 12)
    assert [chance for _, chance in found] == pytest.approx(best[:12])
    assert all(chance == pytest.approx(every[path]) for path, chance in found)
    seen: set[tuple[int, ...]] = {()}
    for path, _ in found:
        assert path[:-1] in seen
        seen.add(path)
    assert len(likeliest_paths(RATES, 1000)) == sum(chance > 0 for chance in every.values())


def test_the_tree_is_as_large_as_pays() -> None:
    free = choose_tree(RATES, 1, lambda batch, guesses: 1.0, most=20)
    assert len(free.parents) == 20 and free.speedup == free.expected_tokens
    assert free.expected_tokens == pytest.approx(1 + sum(chance for _, chance in likeliest_paths(RATES, 20)), abs=1e-3)
    dear = choose_tree(RATES, 1, lambda batch, guesses: 1.0 + 0.25 * guesses)
    assert 0 < len(dear.parents) < 4 and 1.03 < dear.speedup < free.speedup
    assert choose_tree(RATES, 1, lambda batch, guesses: 1.0 + guesses).parents == []


def test_indices_masks_and_depths_tell_the_same_tree() -> None:
    tree = choose_tree(RATES, 4, lambda batch, guesses: 1.0, most=15)
    for guess, parent in enumerate(tree.parents):
        assert tree.depths[guess] == (1 if parent < 0 else tree.depths[parent] + 1)
        assert tree.gather[guess] // 3 == tree.depths[guess] - 1
        mine = {guess} if parent < 0 else {guess} | {i for i in range(15) if tree.mask[parent] >> i & 1}
        assert {i for i in range(15) if tree.mask[guess] >> i & 1} == mine
    siblings = [(p, g) for p, g in zip(tree.parents, tree.gather, strict=True)]
    assert len(set(siblings)) == len(siblings)


def test_a_tree_per_batch_size_and_none_where_it_loses() -> None:
    """Up to eight tokens a step takes one second; beyond that the time is proportional to them."""
    choice = SpecChoice.parse("medusa:heads")
    limits = Limits(max_seq_len=64, max_batch_size=12, max_step_tokens=64)

    def cost(batch: int, guesses: int) -> float:
        return max(1.0, batch * (1 + guesses) / 8)

    found = speculation(choice, RATES, limits, None, cost)
    assert found is not None
    assert [(tree.batch, len(tree.parents)) for tree in found.trees] == [(1, 7), (2, 3), (4, 1), (8, 0), (12, 0)]
    assert found.tree(3) is found.trees[2] and found.tree(5) is None and found.tree(99) is None
    assert speculation(None, [], limits, None, cost) is None
    assert speculation(SpecChoice.parse("ngram"), [], limits, None, cost).drafter == "ngram"
    forced = speculation(choice, RATES, limits, 9, cost)
    assert forced is not None
    assert [(tree.batch, len(tree.parents)) for tree in forced.trees] == [(1, 9), (2, 9), (4, 9), (8, 7), (12, 4)]
    assert forced.trees[3].speedup < 1


def test_what_a_guess_costs_at_first_counts_the_experts_that_it_touches() -> None:
    """The bytes of steps of one token and of a few, for a dense layer and for one with experts of the same width."""

    def slope(layer: Any, *rows: torch.Tensor) -> float:
        def cost(batch: int, guesses: int) -> float:
            tokens = batch * (1 + guesses)
            return layer.cost(torch.empty(tokens, 64), *rows[:2], *(one[:tokens] for one in rows[2:])).bytes

        found = speculation(SpecChoice.parse("mtp"), [], Limits(64, 4, 64), None, cost)
        assert found is not None and found.drafter == "mtp" and not found.trees
        return found.slope

    dense = slope(linear, torch.empty(4096, 64), None)
    routed = slope(expert_linear, torch.empty(64, 4096, 64), None, torch.zeros(16, 2, dtype=torch.int64))
    assert dense < 0.05 and 0.9 < routed < 1.1


@pytest.mark.parametrize("text", ["medusa", "ngram:x", "guess", "medusa:"])
def test_spec_is_checked(text: str) -> None:
    with pytest.raises(UsageError, match="is not known at compile time"):
        SpecChoice.parse(text)


def test_acceptance_is_measured_where_the_text_goes_as_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabulary of 10. The model predicts token + 1; head 0 has + 2 as its first choice, head 1 has + 3 as its
    second."""

    def fake(graph: Graph, tokens: list[int]) -> dict[str, torch.Tensor]:
        ids = torch.tensor(tokens)
        drafts = torch.stack([torch.stack([ids + 2, ids], 1), torch.stack([ids, ids + 3], 1)], 1) % 10
        return {"logits": torch.nn.functional.one_hot((ids + 1) % 10, 10).float(), "medusa.drafts": drafts}

    monkeypatch.setattr(acceptance, "interpret_outputs", fake)
    graph = Graph.__new__(Graph)
    rates = measure_acceptance(graph, [[1, 2, 3, 4, 9, 5, 6, 7, 8, 2]], lambda text, done, total: None)
    assert rates == [[1.0, 0.0], [1.0, 0.0]]  # sorted: the tree is built from the ranks in order
