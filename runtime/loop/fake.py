"""FakeExecutor: a trivial model for tests of everything above the executor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..batch.scheduled import ScheduledBatch, ScheduledSequence
from ..executor.sampling import Sampled, SamplingRow
from ..format.batch import TOP_LOGPROBS, BatchArray
from ..kv.config import GroupConfig
from ..kv.sequence import slot_of
from ..kv.upkeep import Upkeep
from ..requests.params import SamplingParams
from ..requests.sampler import draw


def successor(context: Sequence[int], vocab_size: int) -> int:
    """A rule for the next token: the last token plus one."""
    return (context[-1] + 1) % vocab_size


def context_hash(context: Sequence[int], vocab_size: int) -> int:
    """A rule for the next token that depends on every token before it, so that a single wrong KV entry is noticed."""
    state = 0
    for token in context:
        state = (state * 31 + token + 7) % 1_000_003
    return state % vocab_size


class FakeExecutor:
    """Keeps token ids where a model keeps keys and values, and reads every context back through the block tables.

    The logits are 10 at `rule(context)` and 0 elsewhere. nan_after: a token id after which the logits are NaN; None:
    none. more_groups: KV groups besides the one that keeps everything; they must keep the same ids. inputs: arrays that
    requests may give per token; they do not change logits.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        num_blocks: int = 64,
        host_blocks: int = 0,
        block_size: int = 4,
        max_batch_size: int = 8,
        max_step_tokens: int = 16,
        max_logit_rows: int = 16,
        rule: Callable[[Sequence[int], int], int] = successor,
        nan_after: int | None = None,
        more_groups: Sequence[GroupConfig] = (),
        inputs: Sequence[BatchArray] = (),
    ) -> None:
        self.vocab_size, self.inputs = vocab_size, tuple(inputs)
        self.groups = (GroupConfig(num_blocks, block_size, host_blocks), *more_groups)
        self.max_batch_size, self.max_step_tokens, self.max_logit_rows = max_batch_size, max_step_tokens, max_logit_rows
        self.rule = rule
        self.nan_after = nan_after
        self.caches = [np.full((group.num_blocks, group.block_size), -1, dtype=np.int64) for group in self.groups]
        self.hosts = [np.full((group.host_blocks, group.block_size), -1, dtype=np.int64) for group in self.groups]
        self.batches: list[ScheduledBatch] = []
        self.closed = False

    @property
    def kv_in_reach(self) -> bool:
        """True: the cache is host memory, which no other code writes between steps."""
        return True

    def kv_views(self, group: int, block: int) -> list[memoryview]:
        """The token ids of a block, as bytes."""
        return [memoryview(self.caches[group][block]).cast("B")]

    def step(self, batch: ScheduledBatch) -> np.ndarray:
        """Check the batch against the limits, write its tokens to the cache, and return the rule's logits, float32
        `[batch.num_logit_rows, vocab]`."""
        assert 0 < batch.num_tokens <= self.max_step_tokens
        assert len(batch.sequences) <= self.max_batch_size and batch.num_logit_rows <= self.max_logit_rows
        self.batches.append(batch)
        for blocks, host, upkeep in zip(self.caches, self.hosts, batch.upkeep, strict=bool(batch.upkeep)):
            self._keep_up(blocks, host, upkeep)
        written: set[int] = set()
        rows: list[np.ndarray] = []
        for sequence in batch.sequences:
            for group, blocks, table in zip(self.groups, self.caches, sequence.block_tables, strict=True):
                places = np.arange(sequence.start, sequence.end)
                blocks.reshape(-1)[slot_of(np.array(table), places, group.block_size)] = sequence.token_ids
            size, table = self.groups[0].block_size, sequence.block_tables[0]
            slots = [slot_of(table, place, size) for place in range(sequence.end)]
            assert not written.intersection(slots[sequence.start :]), "two sequences write the same slot"
            written.update(slots[sequence.start :])
            context = self.caches[0].reshape(-1)[slots].tolist()
            assert min(context) >= 0, "a slot is read before it is written"
            self._check_others(sequence, context)
            for row in range(sequence.num_logits):
                rows.append(self._logits(_seen(sequence, context, sequence.end - sequence.num_logits + row)))
        return np.stack(rows) if rows else np.zeros((0, self.vocab_size), dtype=np.float32)

    def _keep_up(self, blocks: np.ndarray, host: np.ndarray, upkeep: Upkeep) -> None:
        slots = blocks.reshape(-1)
        for block in upkeep.zeros:
            blocks[block] = -1
        for source, target in upkeep.moves:
            assert slots[source] >= 0, "what was never written is moved"
            slots[target] = slots[source]
        for block, slot in upkeep.swap_outs:
            host[slot] = blocks[block]
        for source, target in upkeep.copies:
            blocks[target] = blocks[source]
        for slot, block in upkeep.swap_ins:
            blocks[block], host[slot] = host[slot], -1

    def _check_others(self, sequence: ScheduledSequence, context: list[int]) -> None:
        """Check that the other groups keep the right ids of a sequence."""
        others = zip(self.groups[1:], self.caches[1:], sequence.block_tables[1:], strict=True)
        for group, blocks, table in others:
            for kept in (*group.policy.kept(sequence.start), range(sequence.start, sequence.end)):
                held = blocks.reshape(-1)[slot_of(np.array(table), np.array(kept), group.block_size)]
                assert held.tolist() == context[kept.start : kept.stop], "a group does not hold what it keeps"

    def _logits(self, context: list[int]) -> np.ndarray:
        row = np.zeros(self.vocab_size, dtype=np.float32)
        row[self.rule(context, self.vocab_size)] = 10
        if context[-1] == self.nan_after:
            row[3] = np.nan
        return row

    def close(self) -> None:
        """Record that it was closed; tests check `closed`."""
        self.closed = True


def _seen(sequence: ScheduledSequence, cached: list[int], place: int) -> list[int]:
    """The tokens that the token at `place` in the cache sees, itself included."""
    if sequence.draft is None or place <= sequence.start:
        return cached[: place + 1]
    path: list[int] = []
    guess = place - sequence.start - 1
    while guess >= 0:
        path.insert(0, cached[sequence.start + 1 + guess])
        guess = sequence.draft.parents[guess]
    return cached[: sequence.start + 1] + path


class FakeDevice(FakeExecutor):
    """A FakeExecutor that samples itself, and accepts the next step before the last one was collected."""

    samples = True
    kv_in_reach = False  # a step that was started early may be writing  # type: ignore[assignment]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._under_way: deque[Sampled] = deque()
        self._last: Sampled | None = None
        self.most_under_way = 0

    def submit(self, batch: ScheduledBatch, rows: Sequence[SamplingRow | None]) -> int:
        """Run the step at once, as a device does in stream order."""
        assert len(rows) == batch.num_logit_rows and len(self._under_way) < 2
        logits = self.step(batch._replace(sequences=tuple(map(self._known, batch.sequences))))
        tokens = np.array([_draw(row, how) for row, how in zip(logits, rows, strict=True)], dtype=np.int32)
        shifted = logits - logits.max(axis=1, keepdims=True, initial=0)
        logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        order = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_LOGPROBS]
        self._last = Sampled(
            tokens,
            np.take_along_axis(logprobs, tokens[:, None].clip(0), axis=1)[:, 0],
            order.astype(np.int32),
            np.take_along_axis(logprobs, order, axis=1),
            logits if None in rows else None,
        )
        self._under_way.append(self._last)
        self.most_under_way = max(self.most_under_way, len(self._under_way))
        return len(self.batches)

    def collect(self, ticket: int) -> Sampled:
        """The results of the oldest step."""
        return self._under_way.popleft()

    def _known(self, sequence: ScheduledSequence) -> ScheduledSequence:
        """The sequence with pending tokens replaced by those that the last step sampled; an ended request gets an
        arbitrary token."""
        if sequence.token_ids[0] >= 0:
            return sequence
        assert self._last is not None
        return sequence._replace(token_ids=(max(int(self._last.token_ids[-1 - sequence.token_ids[0]]), 0),))


class FakePipeline(FakeExecutor):
    """A FakeExecutor of two stages, each with its own cache: the first runs a step in `begin`, the second in `end`.
    events: (stage, number of the step), in the order in which they ran."""

    def __init__(self, flights: int = 2, **options: Any) -> None:
        super().__init__(**options)
        self.flights, self._first = flights, FakeExecutor(**options)
        self._under_way: deque[tuple[int, ScheduledBatch, bool]] = deque()
        self.events: list[tuple[int, int]] = []
        self.most_under_way = 0

    def begin(self, batch: ScheduledBatch, greedy: bool) -> int:
        """The first stage runs the step at once."""
        assert len(self._under_way) < self.flights
        number = len(self._first.batches)
        self._first.step(batch)
        self.events.append((0, number))
        self._under_way.append((number, batch, greedy))
        self.most_under_way = max(self.most_under_way, len(self._under_way))
        return number

    def end(self, ticket: int) -> tuple[list[int], np.ndarray | None]:
        """The second stage runs the oldest step, see PipelinedExecutor. If a step fails, later ones fail, too."""
        if not self._under_way:
            raise OSError("a step before this one has failed")
        number, batch, greedy = self._under_way.popleft()
        assert number == ticket, "steps end in another order than they began"
        self.events.append((1, number))
        try:
            logits = self.step(batch)
        except BaseException:
            self._under_way.clear()
            raise
        if not greedy:
            return [], logits
        return [_draw(row, None) for row in logits], None


def _draw(logits: np.ndarray, row: SamplingRow | None) -> int:
    if not np.isfinite(logits).all():
        return -1
    if row is None or not row.temperature:
        return int(logits.argmax())
    params = SamplingParams(temperature=row.temperature, top_k=row.top_k, top_p=row.top_p, min_p=row.min_p)
    return draw(logits, params, np.random.default_rng([row.seed, row.counter]).random())
