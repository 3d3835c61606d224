"""A second, smaller engine with the same tokenizer guesses greedily (Leviathan et al. 2023), or the engine's own first
layers with its head do (self-speculation, Zhang et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..batch.scheduled import Draft, ScheduledBatch, ScheduledSequence
from ..errors import UsageError
from ..executor.base import Executor
from ..executor.sampling import greedy_tokens
from ..kv.cache import KVCache
from ..kv.sequence import CachedSequence
from ..requests.generation import Generation
from .drafter import Drafter, Proposal, Wish, chain_chances

MAX_GUESSES = 8


class Closable(Protocol):
    """The executor's engine."""

    def close(self) -> None:
        """Free what the engine owns."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class _Sequence(CachedSequence):
    """The tokens of a request in the draft engine's cache: the computed ones, followed by `guesses` that were computed
    while guessing and are valid only if they were accepted."""

    guesses: list[int] = field(default_factory=list)

    def confirm(self, text: Sequence[int]) -> None:
        """Count accepted guesses as computed; the text's last token is always left to read, so that there are
        logits."""
        for guess in self.guesses:
            if self.num_computed_tokens >= len(text) - 1 or text[self.num_computed_tokens] != guess:
                break
            self.num_computed_tokens += 1
        self.guesses = []


class EngineDrafter(Drafter):
    """Keeps its own KV cache up to date with the requests: accepted tokens are read before it guesses again.

    A request gets no guesses if the draft engine has no memory for it, or if its text is too long for the draft engine.
    """

    first_rate = 0.7

    def __init__(
        self, executor: Executor, max_seq_len: int, engine: Closable | None = None, name: str = "draft"
    ) -> None:
        self.name = name
        self._executor, self._max_seq_len, self._engine = executor, max_seq_len, engine
        self._kv = KVCache(executor.groups)
        if self._kv.keeps_states:
            raise UsageError("the draft engine's model has recurrent states, which cannot take guesses back")
        self._sequences: dict[int, _Sequence] = {}

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        depths = {w.generation.request_id: min(w.count, MAX_GUESSES) for w in wishes[: self._executor.max_batch_size]}
        texts = {w.generation.request_id: [*w.generation.prompt, *w.generation.token_ids] for w in wishes}
        active = [i for i, depth in depths.items() if depth and self._reserve(i, len(texts[i]) + depth)]
        for request_id in active:
            self._sequences[request_id].confirm(texts[request_id])
        newest = self._catch_up(active, texts)
        guesses: dict[int, list[int]] = {i: [newest[i]] for i in active if i in newest}
        active = list(guesses)
        while active := [
            i for i in active if len(guesses[i]) < depths[i] and self._grow(i, len(texts[i]) + len(guesses[i]))
        ]:
            rows = self._step([(i, [guesses[i][-1]], len(texts[i]) + len(guesses[i]) - 1) for i in active])
            for request_id, token in zip(active, rows, strict=True):
                self._sequences[request_id].guesses.append(guesses[request_id][-1])
                guesses[request_id].append(token)
        rates = {w.generation.request_id: w.rate for w in wishes}
        return {i: Proposal(Draft.chain(found), chain_chances(len(found), rates[i])) for i, found in guesses.items()}

    def backlog(self, generation: Generation) -> int:
        sequence = self._sequences.get(generation.request_id)
        computed = 0 if sequence is None else sequence.num_computed_tokens
        return len(generation.prompt) + len(generation.token_ids) - computed

    def read(self, generation: Generation) -> None:
        request_id, text = generation.request_id, [*generation.prompt, *generation.token_ids[:-1]]
        if text and self._reserve(request_id, len(text)):
            self._sequences[request_id].confirm(text)
            self._catch_up([request_id], {request_id: text})

    def _reserve(self, request_id: int, length: int) -> bool:
        """Allocate blocks for `length` tokens, up to the most that a sequence may have at once; False if there are
        none."""
        if length > self._max_seq_len:
            return False
        if request_id not in self._sequences:
            self._sequences[request_id] = _Sequence(tables=self._kv.empty_tables())
        return self._grow(request_id, self._kv.span(self._sequences[request_id], length))

    def _grow(self, request_id: int, length: int) -> bool:
        sequence = self._sequences[request_id]
        if not self._kv.can_grow([(sequence, length)]):
            return False
        self._kv.grow(sequence, length)
        return True

    def _catch_up(self, active: Sequence[int], texts: Mapping[int, list[int]]) -> dict[int, int]:
        """Read the new tokens of each text, in as many steps as needed. Returns the first guess for each request for
        which there is memory."""
        newest: dict[int, int] = {}
        while left := [i for i in active if self._sequences[i].num_computed_tokens < len(texts[i])]:
            room = self._executor.max_step_tokens
            parts: list[tuple[int, list[int], int]] = []
            for request_id in left:
                start = self._sequences[request_id].num_computed_tokens
                part = texts[request_id][start : min(start + room, self._kv.room(self._sequences[request_id]))]
                if part:
                    self._kv.grow(self._sequences[request_id], start + len(part))
                    parts.append((request_id, part, start))
                    room -= len(part)
            if not parts:
                break
            for (request_id, part, start), token in zip(parts, self._step(parts), strict=True):
                self._sequences[request_id].num_computed_tokens = start + len(part)
                self._kv.release_unread(self._sequences[request_id])
                newest[request_id] = token
        return newest

    def _step(self, parts: Sequence[tuple[int, list[int], int]]) -> list[int]:
        """Run (request id, tokens, start) parts; the likeliest token after each."""
        batch = ScheduledBatch(
            tuple(
                ScheduledSequence(i, tuple(tokens), start, self._sequences[i].frozen_tables(), 1)
                for i, tokens, start in parts
            )
        )
        return greedy_tokens(self._executor, batch)

    def forget(self, request_id: int) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._kv.close(sequence)

    def close(self) -> None:
        self._sequences.clear()
        self._executor.close()
        if self._engine is not None:
            self._engine.close()
