"""The scheduler as a state machine under random events, with a shadow of what each slot of each KV group holds."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from icc.runtime.batch.scheduled import Draft, ScheduledBatch, ScheduledSequence, StepOutcome, Verdict
from icc.runtime.errors import CapacityError
from icc.runtime.kv.group import Group, GroupConfig
from icc.runtime.kv.policy import CachePolicy, KeepAll, Latest, Window
from icc.runtime.kv.sequence import NO_BLOCK, slot_of
from icc.runtime.kv.upkeep import Upkeep
from icc.runtime.scheduler.request import RequestSpec
from icc.runtime.scheduler.scheduler import Scheduler, SchedulerConfig
from kv_policies import Chunks, Sinks
from sizes import size_of

Tokens = tuple[int, ...]
ALPHABET = 2  # so few tokens that prefixes collide all the time


def following(tokens: tuple[int, ...]) -> int:
    """The model: what comes after these tokens."""
    return (sum(tokens) + len(tokens) // 3) % ALPHABET


class Memory:
    """Shadow memory of one group: each slot carries the salt and the whole prefix that its KV stands for."""

    def __init__(self, group: Group, config: GroupConfig) -> None:
        self.group, self.size, self.host_blocks = group, config.block_size, config.host_blocks
        self.slots: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.host: dict[int, list[tuple[bytes, tuple[int, ...]] | None]] = {}  # what each host slot holds, by offset
        self.spoilt: set[int] = set()  # blocks that only a request which ended with an error had

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
        for slot, block in upkeep.swap_ins:
            assert self.group.pool.references(block) <= 1, "a shared block is written"  # 0 where its request has ended
            for offset, held in enumerate(self.host.pop(slot)):
                self.slots[block * self.size + offset] = held if held is not None else (b"never written", ())

    def check_own(self, block: int) -> None:
        assert block != NO_BLOCK, "a block that was given back is written"
        assert self.group.pool.references(block) == 1, "a shared block is written"

    def write(self, table: tuple[int, ...], place: int, content: tuple[bytes, tuple[int, ...]]) -> None:
        self.check_own(table[place // self.size])
        self.slots[slot_of(table, place, self.size)] = content

    def check_read(self, table: tuple[int, ...], start: int, salt: bytes, tokens: tuple[int, ...]) -> None:
        """What the token at `start` and those behind it read is there."""
        kept = itertools.chain.from_iterable(self.group.policy.kept(start))
        for place in [*kept, *range(start, len(tokens))]:
            assert table[place // self.size] != NO_BLOCK, "a block is gone that is read"
            assert self.slots[slot_of(table, place, self.size)] == (salt, tokens[: place + 1]), "wrong KV"

    def run(self, sequence: ScheduledSequence, table: tuple[int, ...], salt: bytes, prefixes: list[Tokens]) -> None:
        """A step of a sequence; prefixes: what the sequence is with each of its tokens."""
        for place, prefix in enumerate(prefixes, start=sequence.start):
            self.write(table, place, (salt, prefix))
        self.check_read(table, sequence.start, salt, prefixes[sequence.num_known - 1])

    def spoil(self, table: tuple[int, ...], place: int) -> None:
        """What is written for a request that has ended."""
        assert self.group.pool.references(table[place // self.size]) == 0, "a block of another request is written"
        self.slots[slot_of(table, place, self.size)] = (b"spoilt", ())


class States(Memory):
    """Shadow memory of a group of states: each block carries the salt and the prefix behind which it is the state."""

    def __init__(self, group: Group, config: GroupConfig) -> None:
        super().__init__(group, config)
        self.tokens, self.size = self.size, 1  # of a block, and of the memory's slots

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
        self.salts: dict[int, bytes] = {}
        self.scoring: set[int] = set()
        self.last = ScheduledBatch(())
        self.computed = 0  # tokens
        self.seen: Counter[str] = Counter()  # steps by what is done before them
        self.ahead: Counter[str] = Counter()  # what ran in steps that were scheduled before the one before was known

    def add(self, spec: RequestSpec) -> None:
        self.tokens[spec.request_id], self.salts[spec.request_id] = spec.token_ids, spec.salt
        if spec.max_new_tokens == 0:
            self.scoring.add(spec.request_id)

    def run(self, batch: ScheduledBatch) -> list[StepOutcome]:
        config = self.config
        self.computed += batch.num_tokens
        assert batch.num_tokens <= config.max_step_tokens
        assert batch.num_logit_rows <= config.max_logit_rows
        assert len(batch.sequences) <= config.max_batch_size
        assert len({sequence.request_id for sequence in batch.sequences}) == len(batch.sequences)
        if not batch.sequences:  # not run: what is due before it stays due
            return []
        for memory, upkeep in zip(self.memories, batch.upkeep, strict=True):
            assert len(upkeep.moves) == batch.num_moves
            memory.upkeep(upkeep)
            what = {"zeros": upkeep.zeros, "moves": upkeep.moves, "outs": upkeep.swap_outs, "ins": upkeep.swap_ins}
            self.seen[" ".join(name for name, due in what.items() if due)] += 1
        outcomes = []
        for sequence in batch.sequences:
            if sequence.request_id not in self.tokens:  # it ended while this step was scheduled ahead
                self._spoil(sequence)
                self.ahead["in vain"] += 1
                continue
            tokens, salt = self.tokens[sequence.request_id], self.salts[sequence.request_id]
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
                token = None if sequence.request_id in self.scoring else following(tokens)
                outcomes.append(StepOutcome(sequence.request_id, token))
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
        """The first step that is scheduled after a request failed zeroes what it leaves."""
        for memory, upkeep in zip(self.memories, batch.upkeep, strict=True):
            assert memory.spoilt <= set(upkeep.zeros), "blocks of a request that failed are not zeroed"
            memory.spoilt = set() if batch.sequences else memory.spoilt
        return batch

    def spoil(self, request_id: int) -> None:
        """The blocks that only this request has must be zeroed."""
        tables = self.scheduler._requests[request_id].tables  # those of its last step may have been given back since
        for memory, table in zip(self.memories, tables, strict=True):
            memory.spoilt |= {block for block in table.held() if memory.group.pool.references(block) == 1}

    def _verify(self, sequence: ScheduledSequence, tokens: tuple[int, ...], salt: bytes) -> StepOutcome:
        """Write a tree of guesses and follow it; what its first token reads must be there."""
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
        """Random trees of guesses, right ones and wrong ones, some for requests that take none."""
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
        """A pending token names the row of the step before in which its own request was sampled."""
        rows = [s.request_id for s in self.last.sequences for _ in range(s.num_logits)]
        assert len(sequence.token_ids) == 1 and rows[-1 - sequence.token_ids[0]] == sequence.request_id

    def _spoil(self, sequence: ScheduledSequence) -> None:
        """What a step writes for a request that has ended must never be read."""
        for memory, table in zip(self.memories, sequence.block_tables, strict=True):
            for place in range(sequence.start, sequence.end):
                memory.spoil(table, place)

    def sampled(self, outcomes: list[StepOutcome]) -> None:
        for outcome in outcomes:
            if outcome.token_id is not None and outcome.request_id in self.tokens:
                self.tokens[outcome.request_id] += tuple(self.guessed(outcome))
                self.tokens[outcome.request_id] += (outcome.token_id,)

    def guessed(self, outcome: StepOutcome) -> list[int]:
        """The tokens of the accepted guesses, which are what would have been sampled."""
        [sequence] = [s for s in self.last.sequences if s.request_id == outcome.request_id]
        return [sequence.draft.token_ids[guess] for guess in outcome.accepted] if sequence.draft else []


POLICIES: list[CachePolicy] = [
    KeepAll(), Window(1), Window(2), Window(3), Window(5), Window(8), Sinks(2, 3), Sinks(1, 1), Chunks(4), Latest(),
]  # fmt: skip


HOST = st.sampled_from([0, 0, 1, 3, 12])
SECOND = st.builds(GroupConfig, st.integers(2, 12), st.integers(1, 4), HOST, st.sampled_from(POLICIES))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(2, 12),
        block_size=st.integers(1, 4),
        batch=st.integers(1, 4),
        extra_tokens=st.integers(0, 8),
        extra_rows=st.integers(0, 3),
        host=HOST,
        policy=st.sampled_from([KeepAll(), *POLICIES]),
        second=st.none() | SECOND,
    )
    def start(
        self, blocks: int, block_size: int, batch: int, extra_tokens: int, extra_rows: int, host: int,
        policy: CachePolicy = POLICIES[0], second: GroupConfig | None = None,
    ) -> None:  # fmt: skip
        rows = batch + min(extra_rows, extra_tokens)
        groups = (GroupConfig(blocks, block_size, host, policy),) + (() if second is None else (second,))
        self.config = SchedulerConfig(batch, batch + extra_tokens, rows, groups)
        self.scheduler = Scheduler(self.config)
        self.device = Device(self.config, self.scheduler)
        self.live: dict[int, RequestSpec] = {}
        self.ended: set[int] = set()
        self.flight: ScheduledBatch | None = None  # scheduled before the step that ran last was accounted for
        self.next_id = 0

    @rule(
        tokens=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=14),
        new=st.integers(0, 8),
        priority=st.sampled_from([0, 0, 0, 1]),
        salt=st.sampled_from([b"", b"", b"other"]),
        use_cache=st.booleans(),
        client=st.sampled_from(["", "a"]),
    )
    def add(self, tokens: list[int], new: int, priority: int, salt: bytes, use_cache: bool, client: str = "") -> None:
        self.next_id += 1
        score = new == 0
        spec = RequestSpec(
            self.next_id, tuple(tokens), new, priority, salt, score, use_cache and not score, client,
            first_turn=len(tokens) // 2,
        )  # fmt: skip
        if not self.scheduler.can_ever_fit(spec):
            with pytest.raises(CapacityError):
                self.scheduler.add(spec)
            return
        self.scheduler.add(spec)
        self.live[spec.request_id] = spec
        self.device.add(spec)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 100))
    def fork(self, pick: int) -> None:
        spec = self.live[sorted(self.live)[pick % len(self.live)]]
        self.add(list(spec.token_ids), spec.max_new_tokens, spec.priority, spec.salt, True)

    @rule(
        stop=st.sampled_from([None, None, None, Verdict.STOP, Verdict.ERROR]),
        late_abort=st.sampled_from([None, None, None, 0, 1]),
        ahead=st.booleans(),
        guesses=st.none() | st.integers(0, 1 << 20),
        preempt=st.sampled_from([None, None, 0, 1]),  # oftener than memory runs out
        abort_too=st.booleans(),
    )
    def step(
        self,
        stop: Verdict | None = None,
        late_abort: int | None = None,
        ahead: bool = False,
        guesses: int | None = None,
        preempt: int | None = None,
        abort_too: bool = False,
    ) -> None:
        if preempt is not None and not self.flight and preempt < self.scheduler.num_running:
            request = self.scheduler._running[preempt]
            self.scheduler._preempt(request)
            if abort_too:
                self.abort_id(request.id)
        drafts = {} if guesses is None or self.flight else self.device.drafts(guesses)
        batch = self.flight or self.device.zeroed(self.scheduler.schedule(drafts))
        assert batch.sequences or not self.live, "there is work but nothing is scheduled"
        outcomes = self.device.run(batch)
        self.flight = self.scheduler.schedule_ahead() if ahead else None
        if self.flight is not None:
            self.device.count_ahead(batch, self.device.zeroed(self.flight))
        if stop is not None and outcomes and outcomes[0].token_id is not None:
            outcomes[0] = outcomes[0]._replace(verdict=stop)
        if late_abort is not None and late_abort < len(batch.sequences):
            request_id = batch.sequences[late_abort].request_id
            if request_id in self.live:
                self.abort_id(request_id)
        self.device.sampled(outcomes)
        if stop is Verdict.ERROR and outcomes and outcomes[0].verdict is stop and outcomes[0].request_id in self.live:
            self.device.spoil(outcomes[0].request_id)
        for done in self.scheduler.update(outcomes):
            self.end(done.request_id)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        self.abort_id(sorted(self.live)[pick % len(self.live)])

    def abort_id(self, request_id: int) -> None:
        assert self.scheduler.abort(request_id)
        assert not self.scheduler.abort(request_id)
        self.end(request_id)

    def end(self, request_id: int) -> None:
        assert request_id not in self.ended, "a request ended twice"
        spec = self.live.pop(request_id)
        self.ended.add(request_id)
        assert len(self.device.tokens.pop(request_id)) <= len(spec.token_ids) + spec.max_new_tokens

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # every step computes a token of the first in rank, which is never preempted
        bound = sum(len(spec.token_ids) + spec.max_new_tokens for spec in self.live.values()) * 2
        while self.live:
            assert bound >= 0, "no progress"
            bound -= 1
            self.step()
        assert self.scheduler.kv.is_idle and not self.scheduler.has_work()
        for group, config in zip(self.scheduler.kv.groups, self.config.groups, strict=True):
            assert group.host.num_free == config.host_blocks


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=size_of("state_machine"),
    stateful_step_count=size_of("state_machine_steps"),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_random_walks_with_swaps_and_trees() -> None:
    """The rules of the machine at random: longer runs with fuller caches than hypothesis looks for."""
    seen: Counter[str] = Counter()
    ahead: Counter[str] = Counter()
    for seed in range(100):
        source = random.Random(seed)
        machine = SchedulerMachine()
        blocks, size, batch = source.randint(6, 16), source.randint(1, 4), source.randint(1, 4)
        room = source.randint(0, 16), source.randint(0, 12), source.choice([0, 2, 6, 40])
        second = GroupConfig(source.randint(4, 12), size, source.choice([2, 6, 40]), source.choice(POLICIES))
        machine.start(blocks, size, batch, *room, second=source.choice([None, second, second]))
        for _ in range(120):
            kind = source.random()
            if len(machine.live) < 5 and kind < 0.3:
                tokens = [source.randrange(ALPHABET) for _ in range(source.randint(1, 14))]
                machine.add(tokens, source.randint(0, 16), 0, source.choice([b"", b"other"]), source.random() < 0.8)
            elif kind < 0.34 and machine.live:
                machine.abort(source.randrange(100))
            else:
                machine.step(
                    source.choice([None] * 16 + [Verdict.STOP, Verdict.ERROR]), source.choice([None] * 9 + [0]),
                    source.random() < 0.3, source.choice([None, source.randrange(1 << 20)]),
                    source.choice([None] * 5 + [0, 1]), source.random() < 0.1,
                )  # fmt: skip
            machine.consistent()
        machine.teardown()
        seen += machine.device.seen
        ahead += machine.device.ahead
    both = {"moves outs", "moves ins", "moves outs ins", "outs ins", "zeros ins", "zeros outs ins"}
    assert both <= {name for name, count in seen.items() if count >= 2}, seen
    mixed = {"answers behind chunks", "prompts behind chunks", "answers behind tokens", "waited", "in vain"}
    assert mixed <= {name for name, count in ahead.items() if count >= 50}, ahead


def test_all_orders_of_three_requests_in_four_blocks() -> None:
    """Exhaustive: when each of three requests arrives, and whether and when the second is aborted."""
    prompts = [(0, 1, 0), (0, 1, 0, 1, 1), (0, 1)]
    for arrivals in itertools.product(range(4), repeat=3):
        for abort_at in (None, 0, 1, 2, 3, 5):
            config = SchedulerConfig(2, 4, 2, (GroupConfig(4, 2, arrivals[0]),))
            scheduler = Scheduler(config)
            device = Device(config, scheduler)
            ended: list[int] = []
            for now in range(40):
                for request_id, arrival in enumerate(arrivals):
                    if arrival == now:
                        spec = RequestSpec(request_id, prompts[request_id], 4 - request_id)
                        scheduler.add(spec)
                        device.add(spec)
                batch = scheduler.schedule()
                assert batch.sequences or not scheduler.has_work()
                outcomes = device.run(batch)
                if abort_at == now and scheduler.abort(1):
                    ended.append(1)
                device.sampled(outcomes)
                ended += [done.request_id for done in scheduler.update(outcomes)]
                scheduler.check()
            assert sorted(ended) == [0, 1, 2], (arrivals, abort_at)


@pytest.mark.parametrize("host", [0, 9, 500])
@pytest.mark.parametrize(("blocks", "new"), [(17, 26), (20, 26), (33, 26), (64, 120)])
def test_little_memory_preempts_each_request_at_most_four_times(blocks: int, new: int, host: int) -> None:
    """KV for about one of the largest request: all complete, few preemptions (RELIABILITY R3)."""
    config = SchedulerConfig(16, 32, 16, (GroupConfig(blocks, 2, host),))
    scheduler = Scheduler(config)
    device = Device(config, scheduler)
    for request_id in range(40):
        spec = RequestSpec(request_id, tuple((request_id >> bit) & 1 for bit in range(1 + request_id % 5)), new)
        scheduler.add(spec)
        device.add(spec)
    requests = dict(scheduler._requests)
    ended, steps = [], 0
    while scheduler.has_work():
        batch = scheduler.schedule()
        assert batch.sequences
        outcomes = device.run(batch)
        device.sampled(outcomes)
        ended += [done.reason for done in scheduler.update(outcomes)]
        if steps % 16 == 0:
            scheduler.check()
        steps += 1
    assert ended == ["length"] * 40
    assert max(request.num_preemptions for request in requests.values()) <= 4
    assert steps < 40 * (new + 5)
    assert (scheduler.num_swaps > 0) == (host > 0) and scheduler.num_swaps <= scheduler.num_preemptions
    if host == 500:  # room for everybody: nothing is computed twice
        assert scheduler.num_swaps == scheduler.num_preemptions
        assert device.computed <= sum(1 + i % 5 + new - 1 for i in range(40))
