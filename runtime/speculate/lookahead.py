"""Lookahead decoding: the model finds n-grams while it verifies n-grams that it found before (Fu et al. 2024, "Break
the Sequential Dependency of LLM Inference Using Lookahead Decoding").

A window of W columns and N - 1 levels holds Jacobi trajectories: column c begins c tokens after the text's last token,
and each step appends to each column the model's next token. The oldest token, the levels above it and the new token are
an n-gram; a request's pool keeps the newest G n-grams per first token. If the text ends with that token, these n-grams
are guesses. One step runs both as a tree:

    last token - n-gram 1 ..
               - n-gram G ..
               - level 1 of column 0 - level 2 ..
               - level 0 of column 1 - level 1 of column 1 ..
                                     - level 0 of column 2 - level 1 of column 2 ..

All levels begin as random tokens of the text; a column yields n-grams when the model has replaced all of them. As in
the authors' code, columns keep their distance from the last token however many guesses are accepted. Here, paths with a
common beginning are merged, so that tokens of the window may be accepted, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..batch.scheduled import Draft, ScheduledBatch
from ..format.lookahead import Lookahead
from ..requests.generation import Generation
from .drafter import Drafter, Proposal, Wish
from .ledger import LOAN
from .verify import children

KEYS = 4096  # the most first tokens in a request's pool


class NgramPool:
    """The n-grams of one request: by first token, the newest `most` tails after it, newest last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tails: dict[int, list[tuple[int, ...]]] = {}

    def add(self, first: int, tail: tuple[int, ...]) -> None:
        """Record that `tail` followed `first`; it becomes the newest tail."""
        tails = self._tails.setdefault(first, [])
        if tail in tails:
            tails.remove(tail)
        tails.append(tail)
        del tails[: -self._most]
        if len(self._tails) > KEYS:
            del self._tails[next(iter(self._tails))]

    def behind(self, first: int) -> Sequence[tuple[int, ...]]:
        """The tails after a token, newest first."""
        return self._tails.get(first, ())[::-1]


@dataclass(slots=True)
class _Column:
    """A trajectory: the tokens of all levels, and how many of them the model computed."""

    tokens: list[int]
    age: int = 0


class JacobiWindow:
    """The window of one request. text: its tokens so far, from which random ones are drawn."""

    def __init__(self, shape: Lookahead, text: Sequence[int]) -> None:
        source = random.Random(0)
        self._ngram = shape.ngram
        self._columns = [_Column(source.choices(text, k=shape.ngram - 1)) for _ in range(shape.window)]

    def paths(self, last: int) -> Iterator[tuple[int, ...]]:
        """For each column, the path of tokens after the text's last token: first the level-0 tokens of earlier columns,
        then its own."""
        self._columns[0].tokens[0] = last
        begin: tuple[int, ...] = ()
        for column in self._columns:
            if column is not self._columns[0]:
                begin += (column.tokens[0],)
            yield begin + tuple(column.tokens[1:])

    def advance(self, results: Sequence[int | None], pool: NgramPool) -> None:
        """Append the model's tokens to the columns, None for a column that did not run, and add complete n-grams to the
        pool."""
        for column, result in zip(self._columns, results, strict=True):
            if result is None:
                continue
            first, *levels = column.tokens
            column.tokens = [*levels, result]
            column.age += 1
            if column.age >= self._ngram - 1:
                pool.add(first, tuple(column.tokens))


class _Tree:
    """A tree of paths of guesses, in which common beginnings share nodes; at most `most` nodes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node, in order
        self.chances: list[float] = []

    def add(self, path: Sequence[int], rate: float = 0.0, whole: bool = True) -> None:
        """Add a path. rate: the probability that a token is right if those before are. whole: add nothing if not all of
        the path fits."""
        node, missing = -1, 0
        for token in path:
            node = self._nodes.get((node, token), -2) if node != -2 else -2
            missing += node == -2
        if whole and len(self._nodes) + missing > self._most:
            return
        node = -1
        for depth, token in enumerate(path, start=1):
            if (found := self._nodes.get((node, token))) is None:
                if len(self._nodes) == self._most:
                    return
                found = self._nodes[node, token] = len(self._nodes)
                self.chances.append(rate**depth)
            node = found

    def draft(self) -> Draft:
        """The nodes as a draft."""
        parents, tokens = zip(*self._nodes, strict=True) if self._nodes else ((), ())
        return Draft(tokens, parents)


class LookaheadDrafter(Drafter):
    """Guesses n-grams that the model found in earlier steps, while each step looks for more. Runs no other model."""

    name = "lookahead"
    first_rate = 0.5
    explores = needs_choices = True
    stake = 4 * LOAN

    def __init__(self, shape: Lookahead) -> None:
        self._shape = shape
        self._requests: dict[int, tuple[JacobiWindow, NgramPool]] = {}

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        found: dict[int, Proposal] = {}
        for wish in wishes:
            generation, tree = wish.generation, _Tree(wish.count)
            window, pool = self._of(generation)
            last = (generation.token_ids or generation.prompt)[-1]
            for number, tail in enumerate(pool.behind(last)):
                tree.add(tail, 0.0 if number else wish.rate, whole=bool(number))
            for path in window.paths(last):
                tree.add(path, whole=bool(tree.chances))
            found[generation.request_id] = Proposal(tree.draft(), tuple(tree.chances))
        return found

    def take_choices(self, batch: ScheduledBatch, choices: Mapping[int, Sequence[int]]) -> None:
        for sequence in batch.sequences:
            chosen, own = choices.get(sequence.request_id), self._requests.get(sequence.request_id)
            if sequence.draft is None or chosen is None or own is None:
                continue
            (window, pool), guesses = own, children(sequence.draft)
            window.advance([_behind(path, guesses, chosen) for path in window.paths(sequence.token_ids[0])], pool)

    def _of(self, generation: Generation) -> tuple[JacobiWindow, NgramPool]:
        found = self._requests.get(generation.request_id)
        if found is None:
            text = [*generation.prompt, *generation.token_ids]
            found = self._requests[generation.request_id] = (
                JacobiWindow(self._shape, text),
                NgramPool(self._shape.guesses),
            )
        return found

    def forget(self, request_id: int) -> None:
        self._requests.pop(request_id, None)

    def close(self) -> None:
        self._requests.clear()


def _behind(path: Sequence[int], guesses: Mapping[tuple[int, int], int], chosen: Sequence[int]) -> int | None:
    """The model's token after a path; None if the path did not run, or if its logits were not numbers."""
    node: int | None = -1
    for token in path:
        node = guesses.get((node, token))
        if node is None:
            return None
    return chosen[1 + node] if chosen[1 + node] >= 0 else None
