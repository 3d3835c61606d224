"""UNO: the model guesses for itself, with an adapter (LoRA) that is active only where it guesses (method `uno` of
SGLang and vLLM, their linear sampler).

One step runs the request's newest token, without the drafter's adapter, and random tokens behind it, with the adapter.
The adapter was trained to predict from such noise the tokens that follow, so that every row of the step guesses its
next token, the first one with the model's own weights. An ordinary step then verifies the guesses.

The keys and values of the noise come after the text, in the request's own KV blocks, where the next step overwrites
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ..batch.scheduled import Draft, Extras, ScheduledBatch, ScheduledSequence
from ..executor.base import Executor
from ..executor.sampling import greedy_tokens
from ..format.adapters import ADAPTER
from ..requests.generation import Generation
from .drafter import Drafter, Proposal, Wish, chain_chances
from .rows_from import rows_from

BLOCK = 8  # the most guesses of a step, SGLang's and vLLM's default
_SLOT_BYTES = 4
Part = tuple[Wish, ScheduledSequence]


class UnoDrafter(Drafter):
    """Guesses a chain of at most BLOCK tokens in one step of the model."""

    name = "uno"
    follows = True
    first_rate = 0.7

    def __init__(self, executor: Executor, slot: int, longest: int, release: Callable[[], object]) -> None:
        """slot: where the adapter is. longest: the most tokens of a sequence. release: called once, by `close`."""
        self._executor, self._slot, self._longest, self._release = executor, slot, longest, release
        self._block_sizes = [group.block_size for group in executor.groups]
        self._latest: dict[int, ScheduledSequence] = {}  # by request, as it was in its last step
        self._noise = np.random.default_rng(0)
        self._closed = False

    def follow(self, batch: ScheduledBatch, generations: Mapping[int, Generation]) -> None:
        self._latest |= {one.request_id: one for one in batch.sequences if one.request_id in generations}

    def knows(self, generation: Generation) -> bool:
        return generation.request_id in self._latest

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        found: dict[int, Proposal] = {}
        for parts in self._steps(wishes):
            tokens = iter(greedy_tokens(self._executor, ScheduledBatch(tuple(part for _, part in parts))))
            for wish, part in parts:
                guesses = [next(tokens) for _ in part.token_ids]
                found[part.request_id] = Proposal(Draft.chain(guesses), chain_chances(len(guesses), wish.rate))
        return found

    def _steps(self, wishes: Sequence[Wish]) -> Iterator[list[Part]]:
        """The requests that can guess, grouped into steps that they fit."""
        executor, step, rows = self._executor, list[Part](), 0
        most = min(executor.max_step_tokens, executor.max_logit_rows)
        for wish in wishes:
            if (part := self._part(wish, most)) is None:
                continue
            if len(step) == executor.max_batch_size or rows + len(part.token_ids) > most:
                yield step
                step, rows = [], 0
            step.append((wish, part))
            rows += len(part.token_ids)
        if step:
            yield step

    def _part(self, wish: Wish, most: int) -> ScheduledSequence | None:
        """A request's newest token and noise; None if there is room for fewer than two tokens."""
        generation, before = wish.generation, self._latest[wish.generation.request_id]
        start = len(generation.prompt) + len(generation.token_ids) - 1
        tables = zip(before.block_tables, self._block_sizes, strict=True)
        room = min(self._longest, *(len(table) * size for table, size in tables)) - start
        count = min(BLOCK, wish.count, most, room)
        if count < 2:
            return None
        newest = (generation.token_ids or generation.prompt)[-1]
        noise = self._noise.integers(0, self._executor.vocab_size, count - 1)
        return ScheduledSequence(
            generation.request_id,
            (newest, *noise.tolist()),
            start,
            before.block_tables,
            count,
            prompt=before.prompt,
            extras=self._extras(before.extras, start, count),
        )

    def _extras(self, given: Extras, start: int, count: int) -> Extras:
        """The inputs of a request, with its own adapter for the newest token and the drafter's for the noise."""
        own = given.get(ADAPTER.name, b"")[start * _SLOT_BYTES : (start + 1) * _SLOT_BYTES] or ADAPTER.fill_row
        slots = np.array([*np.frombuffer(own, np.int32), *[self._slot] * (count - 1)], np.int32)
        return {**given, ADAPTER.name: rows_from(start, slots[:, None])}

    def forget(self, request_id: int) -> None:
        self._latest.pop(request_id, None)

    def close(self) -> None:
        self._latest.clear()
        if not self._closed:
            self._closed = True
            self._release()
