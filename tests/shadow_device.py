"""A device that runs scheduled batches on shadow memory: the content of each slot of each KV group, and its owner.

Its model is `following`, which gives the token after some tokens.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

from icc.runtime.batch.scheduled import Draft, ScheduledBatch, ScheduledSequence, StepOutcome
from icc.runtime.kv.config import GroupConfig
from icc.runtime.kv.group import Group
from icc.runtime.kv.sequence import NO_BLOCK, slot_of
from icc.runtime.kv.upkeep import Upkeep
from icc.runtime.scheduler.request import RequestSpec
from icc.runtime.scheduler.scheduler import Scheduler, SchedulerConfig

Tokens = tuple[int, ...]
ALPHABET = 2  # so few tokens that prefixes often collide


def following(tokens: tuple[int, ...]) -> int:
    """The model: the token that comes after these tokens."""
    return (sum(tokens) + len(tokens) // 3) % ALPHABET


class Memory:
    """Shadow memory of one group: each slot holds the salt and the whole prefix that its KV represents."""

    def __init__(self, group: Group, config: GroupConfig) -> None:
        self.group, self.size, self.host_blocks = group, config.block_size, config.host_blocks
        self.slots: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.host: dict[int, list[tuple[bytes, tuple[int, ...]] | None]] = {}  # content of each host slot by offset
        self.spoilt: set[int] = set()  # blocks that only a failed request had

    def upkeep(self, upkeep: Upkeep) -> None:
        for block in upkeep.zeros:
            for offset in range(self.size):
                self.slots.pop(block * self.size + offset, None)
        for source, target in upkeep.moves:
            assert min(source, target) >= 0, "what is not there is moved"
            self.slots[target] = self.slots[source]
        for block, slot in upkeep.swap_outs:
            assert 0 <= slot < self.host_blocks and block != NO_BLOCK
            self.host[slot] = [self.slots.get(block * self.size + offset) for offset in range(self.size)]
        for source, target in upkeep.copies:
            assert min(source, target) >= 0 and source != target
            for offset in range(self.size):
                self.slots.pop(target * self.size + offset, None)
                if (held := self.slots.get(source * self.size + offset)) is not None:
                    self.slots[target * self.size + offset] = held
        for slot, block in upkeep.swap_ins:
            assert self.group.pool.references(block) <= 1, "a shared block is written"  # 0 if its request has ended
            for offset, held in enumerate(self.host.pop(slot)):
                self.slots[block * self.size + offset] = held if held is not None else (b"never written", ())

    def check_own(self, block: int) -> None:
        assert block != NO_BLOCK, "a block that was given back is written"
        assert self.group.pool.references(block) == 1, "a shared block is written"

    def write(self, table: tuple[int, ...], place: int, content: tuple[bytes, tuple[int, ...]]) -> None:
        self.check_own(table[place // self.size])
        self.slots[slot_of(table, place, self.size)] = content

    def check_read(self, table: tuple[int, ...], start: int, salt: bytes, tokens: tuple[int, ...]) -> None:
        """Assert that the keys and values that the tokens from `start` on read are present."""
        kept = itertools.chain.from_iterable(self.group.policy.kept(start))
        for place in [*kept, *range(start, len(tokens))]:
            assert table[place // self.size] != NO_BLOCK, "a block is gone that is read"
            assert self.slots[slot_of(table, place, self.size)] == (salt, tokens[: place + 1]), "wrong KV"

    def run(self, sequence: ScheduledSequence, table: tuple[int, ...], salt: bytes, prefixes: list[Tokens]) -> None:
        """Run a step of a sequence. prefixes: the prefix that ends with each of its tokens."""
        for place, prefix in enumerate(prefixes, start=sequence.start):
            self.write(table, place, (salt, prefix))
        self.check_read(table, sequence.start, salt, prefixes[sequence.num_known - 1])

    def spoil(self, table: tuple[int, ...], place: int) -> None:
        """Overwrite a slot, as a step does for a request that has ended."""
        assert self.group.pool.references(table[place // self.size]) == 0, "a block of another request is written"
        self.slots[slot_of(table, place, self.size)] = (b"spoilt", ())


class States(Memory):
    """Shadow memory of a group of states: each block holds the salt and the prefix after which it is the state."""

    def __init__(self, group: Group, config: GroupConfig) -> None:
        super().__init__(group, config)
        self.tokens, self.size = self.size, 1  # per block, and per slot of the memory

    def upkeep(self, upkeep: Upkeep) -> None:
        super().upkeep(upkeep._replace(moves=()))

    def run(self, sequence: ScheduledSequence, table: tuple[int, ...], salt: bytes, prefixes: list[Tokens]) -> None:
        start, known = sequence.start, prefixes[sequence.num_known - 1]
        if start:
            assert self.slots[table[(start - 1) // self.tokens]] == (salt, known[:start]), "the state of another prefix"
        for number in range(start // self.tokens, (len(known) - 1) // self.tokens + 1):
            if table[number] != NO_BLOCK:
                self.write(table, number, (salt, known[: min((number + 1) * self.tokens, len(known))]))
        assert table[(len(known) - 1) // self.tokens] != NO_BLOCK, "the last state is lost"

    def spoil(self, table: tuple[int, ...], place: int) -> None:
        if table[place // self.tokens] != NO_BLOCK:
            super().spoil(table, place // self.tokens)


class Device:
    """Executes batches on shadow memory."""

    def __init__(self, config: SchedulerConfig, scheduler: Scheduler) -> None:
        self.config, self.scheduler = config, scheduler
        pairs = zip(scheduler.kv.groups, config.groups, strict=True)
        self.memories = [(States if of.holds_states else Memory)(group, of) for group, of in pairs]
        self.tokens: dict[int, tuple[int, ...]] = {}  # request -> all its tokens
        self.beams: dict[int, dict[int, Tokens]] = {}  # request -> all tokens of each of its beams
        self.looked_at: dict[int, set[int]] = {}  # request -> the beams whose logits have arrived
        self.salts: dict[int, bytes] = {}
        self.scoring: set[int] = set()
        self.last = ScheduledBatch(())
        self.computed = 0  # tokens
        self.seen: Counter[str] = Counter()  # steps by the upkeep before them
        self.copied: Counter[str] = Counter()  # blocks for beams, and other events in their steps
        self.ahead: Counter[str] = Counter()  # what ran in steps scheduled before the previous one was known

    def add(self, spec: RequestSpec) -> None:
        self.tokens[spec.request_id], self.salts[spec.request_id] = spec.token_ids, spec.salt
        if spec.max_new_tokens == 0:
            self.scoring.add(spec.request_id)
        if spec.beams > 1:
            self.beams[spec.request_id], self.looked_at[spec.request_id] = {0: spec.token_ids}, set()

    def run(self, batch: ScheduledBatch) -> list[StepOutcome]:
        config = self.config
        self.computed += batch.num_tokens
        assert batch.num_tokens <= config.max_step_tokens
        assert batch.num_logit_rows <= config.max_logit_rows
        assert len(batch.sequences) <= config.max_batch_size
        assert len({(sequence.request_id, sequence.beam) for sequence in batch.sequences}) == len(batch.sequences)
        if not batch.sequences:  # not run: the upkeep before it is still due
            return []
        for memory, upkeep in zip(self.memories, batch.upkeep, strict=True):
            assert len(upkeep.moves) == batch.num_moves
            memory.upkeep(upkeep)
            what = {"zeros": upkeep.zeros, "moves": upkeep.moves, "outs": upkeep.swap_outs, "ins": upkeep.swap_ins}
            self.copied["copies"] += len(upkeep.copies)
            self.copied["copies outs"] += bool(upkeep.copies and upkeep.swap_outs)
            self.copied["copies moves"] += bool(upkeep.copies and upkeep.moves)
            self.seen[" ".join(name for name, due in what.items() if due)] += 1
        outcomes = []
        for sequence in batch.sequences:
            if sequence.request_id not in self.tokens:  # it ended after this step was scheduled
                self._spoil(sequence)
                self.ahead["in vain"] += 1
                continue
            tokens, salt = self.tokens[sequence.request_id], self.salts[sequence.request_id]
            if sequence.request_id in self.beams:
                tokens = self.beams[sequence.request_id][sequence.beam]
            if sequence.token_ids[0] < 0:
                self._check_pending(sequence)
                sequence = sequence._replace(token_ids=tokens[sequence.start :])
            if sequence.draft is not None:
                outcomes.append(self._verify(sequence, tokens, salt))
                continue
            assert sequence.token_ids == tokens[sequence.start : sequence.end] and sequence.token_ids
            prefixes = [tokens[: position + 1] for position in range(sequence.start, sequence.end)]
            for memory, table in zip(self.memories, sequence.block_tables, strict=True):
                memory.run(sequence, table, salt, prefixes)
            assert sequence.num_logits <= len(sequence.token_ids)
            if sequence.num_logits:
                silent = sequence.request_id in self.scoring or sequence.request_id in self.beams
                if sequence.request_id in self.beams:
                    assert sequence.end == len(tokens), "the logits of a beam that is not whole"
                    self.looked_at[sequence.request_id].add(sequence.beam)
                token = None if silent else following(tokens)
                outcomes.append(StepOutcome(sequence.request_id, token, beam=sequence.beam))
        self.last = batch
        return outcomes

    def count_ahead(self, under_way: ScheduledBatch, ahead: ScheduledBatch) -> None:
        before = {sequence.request_id: sequence for sequence in under_way.sequences}
        for sequence in ahead.sequences:
            last = before.get(sequence.request_id)
            kind = "answers" if sequence.token_ids[0] < 0 else "prompts"
            if last is None:
                self.ahead["waited"] += 1
            else:
                self.ahead[f"{kind} behind {'chunks' if len(last.token_ids) > 1 else 'tokens'}"] += 1

    def zeroed(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Check that the first step scheduled after a request failed zeroes the blocks that it left."""
        for memory, upkeep in zip(self.memories, batch.upkeep, strict=True):
            assert memory.spoilt <= set(upkeep.zeros), "blocks of a request that failed are not zeroed"
            memory.spoilt = set() if batch.sequences else memory.spoilt
        return batch

    def spoil(self, request_id: int) -> None:
        """Record that the blocks of this request alone must be zeroed."""
        # the blocks of its last step may have been freed since
        request = self.scheduler.queues.requests[request_id]
        members = [request] if request.beams is None else request.beams.members.values()
        for number, memory in enumerate(self.memories):
            held = Counter(block for member in members for block in member.tables[number].held())
            memory.spoilt |= {b for b, count in held.items() if memory.group.pool.references(b) == count}

    def branch(self, request_id: int, width: int, source: random.Random) -> None:
        """Continue a request, whose beams' logits have all arrived, with random branches."""
        before = self.beams[request_id]
        ways = [(parent, token) for parent in before for token in range(ALPHABET)]
        source.shuffle(ways)
        chosen = ways[: source.randint(1, width)]
        placed = self.scheduler.branch(request_id, chosen)
        assert len(set(placed)) == len(chosen) and max(placed) < width
        pairs = zip(placed, chosen, strict=True)
        self.beams[request_id] = {number: (*before[parent], token) for number, (parent, token) in pairs}
        self.looked_at[request_id].clear()

    def forget(self, request_id: int) -> Tokens:
        """Remove a request that has ended; returns its tokens."""
        self.beams.pop(request_id, None), self.looked_at.pop(request_id, None)
        return self.tokens.pop(request_id)

    def _verify(self, sequence: ScheduledSequence, tokens: tuple[int, ...], salt: bytes) -> StepOutcome:
        """Write a tree of guesses and follow it; asserts that the keys that its first token reads are present."""
        draft = sequence.draft
        assert draft is not None and sequence.token_ids == (tokens[-1], *draft.token_ids)
        assert sequence.start == len(tokens) - 1 and sequence.num_logits == len(draft) + 1
        prefixes = [tokens]
        for guess, parent in zip(draft.token_ids, draft.parents, strict=True):
            prefixes.append((*prefixes[parent + 1], guess))
        for memory, table in zip(self.memories, sequence.block_tables, strict=True):
            memory.run(sequence, table, salt, prefixes)
        accepted: list[int] = []
        while True:
            here = accepted[-1] if accepted else -1
            token = following(prefixes[here + 1])
            right = [g for g, p in enumerate(draft.parents) if p == here and draft.token_ids[g] == token]
            if not right:
                return StepOutcome(sequence.request_id, token, accepted=tuple(accepted))
            accepted.append(right[0])

    def drafts(self, seed: int) -> dict[int, Draft]:
        """Random trees of right and wrong guesses, some of them for requests that take none."""
        source = random.Random(seed)
        found: dict[int, Draft] = {}
        for request_id in [*self.scheduler.decoding, *list(self.tokens)[:1]]:
            prefixes, guesses, parents = [self.tokens[request_id]], [], []
            for _ in range(source.randrange(7)):
                parent = source.randrange(len(prefixes)) - 1
                right = following(prefixes[parent + 1])
                guess = right if source.random() < 0.7 else 1 - right
                if (parent, guess) not in zip(parents, guesses, strict=True):
                    parents.append(parent), guesses.append(guess)
                    prefixes.append((*prefixes[parent + 1], guess))
            found[request_id] = Draft(tuple(guesses), tuple(parents))
        return found

    def _check_pending(self, sequence: ScheduledSequence) -> None:
        """Assert that a pending token names the row of the previous step in which its own request was sampled."""
        rows = [s.request_id for s in self.last.sequences for _ in range(s.num_logits)]
        assert len(sequence.token_ids) == 1 and rows[-1 - sequence.token_ids[0]] == sequence.request_id

    def _spoil(self, sequence: ScheduledSequence) -> None:
        """Mark the slots that a step writes for an ended request, which must never be read."""
        for memory, table in zip(self.memories, sequence.block_tables, strict=True):
            for place in range(sequence.start, sequence.end):
                memory.spoil(table, place)

    def sampled(self, outcomes: list[StepOutcome]) -> None:
        for outcome in outcomes:
            if outcome.token_id is not None and outcome.request_id in self.tokens:
                self.tokens[outcome.request_id] += tuple(self.guessed(outcome))
                self.tokens[outcome.request_id] += (outcome.token_id,)

    def guessed(self, outcome: StepOutcome) -> list[int]:
        """The tokens of the accepted guesses, which equal those that would have been sampled."""
        [sequence] = [s for s in self.last.sequences if s.request_id == outcome.request_id]
        return [sequence.draft.token_ids[guess] for guess in outcome.accepted] if sequence.draft else []
