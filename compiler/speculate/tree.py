"""The tree of guesses: greedy search over paths of head choices (Cai et al. 2024, section 2.3.3), sized by its cost.

A guess is a path of ranks, one per head; by the independence that the paper assumes, its probability is the product of
the acceptance rates along it. The search repeatedly adds the likeliest guess that is not in the tree yet; its parent is
in the tree by then. Every prefix of that order is a tree, and the best one has the most expected tokens per unit of
time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from ...runtime.format.speculation import MAX_GUESSES, DraftTree

WORTHWHILE = 1.03  # a smaller expected speed-up is not worth the cost
Cost = Callable[[int, int], float]  # (batch, guesses per request) -> seconds of the step, including drafting


def likeliest_paths(acceptance: Sequence[Sequence[float]], count: int) -> list[tuple[tuple[int, ...], float]]:
    """The `count` likeliest paths of ranks with their probabilities, parents before children."""
    found: list[tuple[tuple[int, ...], float]] = []
    heap: list[tuple[float, tuple[int, ...]]] = [(-acceptance[0][0], (0,))]
    while heap and len(found) < count:
        negative, path = heapq.heappop(heap)
        if -negative <= 0:
            break
        found.append((path, -negative))
        depth, rank = len(path), path[-1]
        here = acceptance[depth - 1]
        if rank + 1 < len(here):  # the next sibling
            heapq.heappush(heap, (negative * here[rank + 1] / here[rank], (*path[:-1], rank + 1)))
        if depth < len(acceptance):  # the first child
            heapq.heappush(heap, (negative * acceptance[depth][0], (*path, 0)))
    return found


def choose_tree(acceptance: Sequence[Sequence[float]], batch: int, cost: Cost, most: int = MAX_GUESSES) -> DraftTree:
    """The best tree for steps of `batch` requests; without guesses if none is worthwhile.

    acceptance[head][rank] must not rise with the rank. `most` bounds the guesses of a request.
    """
    paths = likeliest_paths(acceptance, most)
    plain = cost(batch, 0)
    best, speedup, expected = 0, 1.0, 1.0
    tokens = 1.0
    for count, (_, chance) in enumerate(paths, start=1):
        tokens += chance
        gain = tokens * plain / cost(batch, count)
        if gain > speedup:
            best, speedup, expected = count, gain, tokens
    if speedup < WORTHWHILE:
        best, speedup, expected = 0, 1.0, 1.0
    return _tree(batch, paths[:best], len(acceptance[0]), expected, speedup)


def tree_of(acceptance: Sequence[Sequence[float]], batch: int, cost: Cost, count: int) -> DraftTree:
    """The tree of the `count` likeliest guesses, whether or not it pays."""
    paths = likeliest_paths(acceptance, count)
    expected = 1.0 + sum(chance for _, chance in paths)
    return _tree(batch, paths, len(acceptance[0]), expected, expected * cost(batch, 0) / cost(batch, len(paths)))


def _tree(
    batch: int, paths: Sequence[tuple[tuple[int, ...], float]], ranks: int, expected: float, speedup: float
) -> DraftTree:
    number = {path: index for index, (path, _) in enumerate(paths)}
    parents = [number.get(path[:-1], -1) for path, _ in paths]
    masks: list[int] = []
    for index, parent in enumerate(parents):
        masks.append(1 << index | (masks[parent] if parent >= 0 else 0))
    return DraftTree(
        batch=batch,
        parents=parents,
        depths=[len(path) for path, _ in paths],
        gather=[(len(path) - 1) * ranks + path[-1] for path, _ in paths],
        mask=masks,
        chances=[round(chance, 4) for _, chance in paths],
        expected_tokens=round(expected, 3),
        speedup=round(speedup, 3),
    )
