"""A draft layer in the engine guesses, from each token and the hidden state before it (multi-token prediction,
DeepSeek-V3, section 2.2; EAGLE-3, Li et al. 2025), the next token, and from its own hidden states the tokens after
that.

Its keys and values are in the engine's KV cache, at the positions of the hidden states, and are cached, swapped out and
shared with the request's blocks. In a prefix from the cache, the last position holds what the layer computed for the
token that followed in the earlier request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..batch.scheduled import Extras, ScheduledBatch, ScheduledSequence
from ..executor.base import LayeredExecutor
from ..executor.sampling import likeliest_tokens
from ..format.program import ASKED_ROWS
from ..format.speculation import DRAFT_HIDDEN, HIDDEN, TAP
from ..requests.generation import Generation
from .drafter import Drafter, Proposal, Wish
from .ledger import LOAN
from .rows_from import rows_from
from .siblings import PlannedGuess, SecondChoices, best_guesses, proposal
from .verify import children

MAX_GUESSES = 8
WAITING = 64  # the most hidden states of a request that wait before the layer reads them


def extras(start: int, rows: np.ndarray) -> Extras:
    """The extras of a sequence with rows [n, H] float32 for the positions from `start` on."""
    return {DRAFT_HIDDEN: rows_from(start, rows)}


@dataclass(slots=True)
class Unread:
    """Hidden states [n, H] of a request for the positions from `start` on. read: the layer has read those before this
    position. tables: the request's block tables."""

    start: int
    read: int
    rows: np.ndarray
    tables: tuple[tuple[int, ...], ...]
    prompt: int

    @property
    def end(self) -> int:
        """The position after the last hidden state."""
        return self.start + len(self.rows)

    @property
    def waiting(self) -> int:
        """How many hidden states are unread."""
        return self.end - self.read

    def all_read(self) -> Unread:
        """The state after all was read: only the last hidden state is kept, because it may be read again."""
        return Unread(self.end - 1, self.end, self.rows[-1:], self.tables, self.prompt)


class LayerDrafter(Drafter):
    """Reads the hidden states of every step, at once or later, and guesses a chain, with second choices as branches if
    those were right often enough.

    trees: False: only chains.
    """

    follows = True
    first_rate = 0.7
    stake = 4 * LOAN  # for following and first guesses, before it is known whether guesses pay

    def __init__(self, executor: LayeredExecutor, block_sizes: Sequence[int], name: str, keeps: bool = True) -> None:
        """block_sizes: of each KV group. keeps: whether the layer has its own keys and values. A layer without them
        only reads the newest token, and guesses all further tokens from its position."""
        self.name, self._keeps = name, keeps
        self._executor, self._block_sizes = executor, block_sizes
        self._unread: dict[int, Unread] = {}
        self.trees, self.seconds = True, SecondChoices()
        self._said: dict[int, tuple[int, list[tuple[int, ...]]]] = {}  # by request: length of the text, choices

    def follow(self, batch: ScheduledBatch, generations: Mapping[int, Generation]) -> None:
        wanted: list[tuple[ScheduledSequence, list[int]]] = []  # and rows of its tokens in the text
        row = 0
        for sequence in batch.sequences:
            generation = generations.get(sequence.request_id)
            if generation is not None:
                self._learn(generation)
                wanted.append((sequence, [row + i for i in _rows_of(sequence, generation)]))
            row += len(sequence.token_ids)
        kept = [(sequence, rows, 0 if self._keeps else len(rows) - 1) for sequence, rows in wanted if rows]
        hidden = self._hidden([row for _, rows, first in kept for row in rows[first:]])
        start = 0
        for sequence, rows, first in kept:
            count = len(rows) - first
            self._keep(sequence, sequence.start + first, hidden[start : start + count])
            start += count
        full = [i for i, unread in self._unread.items() if i in generations and unread.waiting >= WAITING]
        self._read({i: generations[i] for i in full})

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        wishes = [w for w in wishes if w.generation.request_id in self._unread][: self._executor.max_batch_size]
        texts = {w.generation.request_id: len(w.generation.prompt) + len(w.generation.token_ids) for w in wishes}
        wishes = [w for w in wishes if self._is_current(w.generation.request_id, texts[w.generation.request_id])]
        plans = {w.generation.request_id: self._plan(w) for w in wishes}
        depths = {i: max(guess.depth for guess in plan) for i, plan in plans.items()}
        tables = {i: self._unread[i].tables for i in depths}
        prompts = {i: self._unread[i].prompt for i in depths}
        found = self._read({w.generation.request_id: w.generation for w in wishes})
        guesses = {i: [choices] for i, (choices, _) in found.items()}
        while active := [i for i in found if len(guesses[i]) < depths[i]]:
            parts: list[ScheduledSequence] = []
            for i in active:
                place = texts[i] - 2 + self._keeps * len(guesses[i])  # after the model's last hidden state
                if self._has_place(tables[i], place):
                    hidden = extras(place, found[i][1])
                    parts.append(
                        ScheduledSequence(i, (guesses[i][-1][0],), place, tables[i], 1, None, False, prompts[i], hidden)
                    )
            if not parts:
                break
            found = self._step(parts)
            for i, (choices, _) in found.items():
                guesses[i].append(choices)
        self._said |= {i: (texts[i], choices) for i, choices in guesses.items()}
        return {i: proposal(plans[i], choices) for i, choices in guesses.items()}

    def _plan(self, wish: Wish) -> list[PlannedGuess]:
        return best_guesses(wish.rate, self.seconds.share if self.trees else 0.0, min(wish.count, MAX_GUESSES))

    def _learn(self, generation: Generation) -> None:
        if generation.request_id in self._said:
            length, choices = self._said.pop(generation.request_id)
            self.seconds.learn(choices, generation.token_ids[length - len(generation.prompt) :])

    def forget(self, request_id: int) -> None:
        self._unread.pop(request_id, None)
        self._said.pop(request_id, None)

    def close(self) -> None:
        self._unread.clear()
        self._said.clear()

    def _hidden(self, rows: list[int]) -> np.ndarray:
        """The model's hidden states [n, H] for these token rows of the last step."""
        most, found = self._executor.max_logit_rows, list[np.ndarray]()
        for start in range(0, len(rows), most):
            asked = {ASKED_ROWS: np.array(rows[start : start + most], np.int32)}
            part = self._executor.run(TAP, asked)[HIDDEN]
            found.append(part.reshape(len(part), -1))
        return np.concatenate(found) if found else np.zeros((0, 0), np.float32)

    def _keep(self, sequence: ScheduledSequence, start: int, rows: np.ndarray) -> None:
        """Keep a sequence's hidden states [n, H] for the positions from `start` on until they are read; they are
        appended to unread ones if they follow these."""
        before = self._unread.get(sequence.request_id)
        if self._keeps and before is not None and before.read < start <= before.end:
            rows = np.concatenate([before.rows[before.read - before.start : start - before.start], rows])
            start = before.read
        self._unread[sequence.request_id] = Unread(start, start, rows, sequence.block_tables, sequence.prompt)

    def _is_current(self, request_id: int, length: int) -> bool:
        """Whether the newest hidden state belongs to the token before the newest of `length` tokens."""
        unread = self._unread[request_id]
        return len(unread.rows) > 0 and unread.end == length - 1

    def _has_place(self, tables: Sequence[Sequence[int]], place: int) -> bool:
        """Whether the tables have blocks for a position."""
        return all(len(table) * size > place for table, size in zip(tables, self._block_sizes, strict=True))

    def _read(self, generations: Mapping[int, Generation]) -> dict[int, tuple[tuple[int, ...], np.ndarray]]:
        """Read all unread hidden states of these requests, at least the newest one. For each request, returns the
        likeliest next tokens and the layer's hidden state [1, H]."""
        newest: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}
        done = {i: min(self._unread[i].read, self._unread[i].end - 1) for i in generations}
        while left := [i for i in generations if done[i] < self._unread[i].end]:
            room, parts = self._executor.max_step_tokens, list[ScheduledSequence]()
            for i in left[: self._executor.max_batch_size]:
                unread, text = self._unread[i], [*generations[i].prompt, *generations[i].token_ids]
                end = min(unread.end, done[i] + room)
                if end > done[i]:
                    hidden = extras(unread.start, unread.rows)
                    tokens = tuple(text[done[i] + 1 : end + 1])
                    parts.append(
                        ScheduledSequence(i, tokens, done[i], unread.tables, 1, None, False, unread.prompt, hidden)
                    )
                    room, done[i] = room - len(tokens), end
            newest |= self._step(parts)
        for i in generations:
            self._unread[i] = self._unread[i].all_read()
        return newest

    def _step(self, parts: Sequence[ScheduledSequence]) -> dict[int, tuple[tuple[int, ...], np.ndarray]]:
        """Run the layer; for each request, the likeliest tokens after its part, and the hidden state [1, H] there."""
        choices = likeliest_tokens(self._executor, ScheduledBatch(tuple(parts)))
        hidden = self._executor.given(HIDDEN).reshape(len(parts), 1, -1)
        return {part.request_id: (tokens, rows) for part, tokens, rows in zip(parts, choices, hidden, strict=True)}


def _rows_of(sequence: ScheduledSequence, generation: Generation) -> list[int]:
    """The rows of a sequence's tokens in a step that are in the request's text, in order, without the text's last
    token; of guesses only the accepted ones."""
    count = len(generation.prompt) + len(generation.token_ids) - 1 - sequence.start
    if sequence.draft is None:
        return list(range(min(len(sequence.token_ids), count)))
    rows, guesses = [0], children(sequence.draft)
    for token in generation.token_ids[sequence.start + 1 - len(generation.prompt) :][: count - 1]:
        guess = guesses.get((rows[-1] - 1, token))
        if guess is None:
            break
        rows.append(1 + guess)
    return rows[: max(count, 0)]
