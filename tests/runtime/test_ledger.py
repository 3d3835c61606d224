"""When guessing pays: accounts that are never overdrawn, and the measured costs of steps and of reading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import sleep
from typing import Any

import pytest
from icc.runtime.batch.scheduled import Draft, ScheduledBatch
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeDevice, context_hash
from icc.runtime.requests.generation import Generation
from icc.runtime.requests.params import SamplingParams
from icc.runtime.speculate.drafter import Drafter, Proposal, Wish
from icc.runtime.speculate.ledger import (
    CREDIT,
    FIRST,
    LOAN,
    MOST_SAVED,
    OVERHEAD,
    SLOWER,
    Account,
    Savings,
    StepTimes,
)
from oracle_drafters import VOCAB, Oracle

MakeLLM = Callable[..., LLM]


def play(account: Account, steps: int, cost: float, accept: Callable[[int], int]) -> tuple[float, int]:
    """Simulate a request whose drafts of four guesses cost `cost` plain steps each. accept: how many are right, by
    step. Returns (time in plain steps, tokens)."""
    time, tokens = 0.0, 0
    for step in range(steps):
        time += 1
        tokens += 1
        if account.tick() and account.balance >= cost:
            right = accept(step)
            time += cost
            tokens += right
            account.settle(4, 4, right, cost)
    return time, tokens


@pytest.mark.parametrize("cost", [0.02, 0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("steps", [100, 1000])
def test_a_request_that_never_accepts_costs_at_most_three_percent(cost: float, steps: int) -> None:
    time, tokens = play(Account(0.6), steps, cost, lambda step: 0)
    assert tokens == steps
    assert time <= 1.03 * steps


def test_what_pays_goes_on_and_what_stops_paying_stops() -> None:
    account = Account(0.6)
    time, tokens = play(account, 200, 0.4, lambda step: 2)
    assert tokens / time > 2.0
    time, _ = play(account, 300, 0.4, lambda step: 0)
    assert time < 300 + MOST_SAVED + 300 * 0.02
    time, tokens = play(account, 2000, 0.4, lambda step: 3)  # the account notices when it pays again
    assert tokens / time > 1.5


def test_a_miss_makes_those_pause_that_have_won_nothing() -> None:
    """If 70 % of guesses are right, three drafts in ten are completely wrong: no reason to stop."""
    new, winner = Account(rate=0.7), Account(rate=0.7)
    winner.settle(4, 4, 3, 0.5)
    for account in (new, winner):
        account.settle(4, 4, 0, 0.5)
    assert new.pause > 0 and winner.pause == 0
    while winner.pause == 0:
        winner.settle(4, 4, 0, 0.5)
    assert 0 < winner.balance < CREDIT, "what it had won is all that it lost"


def test_costs_are_measured() -> None:
    times = StepTimes(slope=0.1)
    assert times.most(1) == 0  # nothing is tried before a step without guesses was measured
    times.record(1, 0, 1.0)
    assert times.most(1) == 1
    assert times.charge(1, 4) == pytest.approx(1.5 / 1.1 - 1 + OVERHEAD)
    for _ in range(50):
        times.record(1, 0, 1.0)
        times.record(16, 0, 4.0)
        times.record(1, 4, 1.2)
        times.record(1, 8, 1.4)
    assert times.most(1) == 16
    assert times.charge(1, 8) == pytest.approx(0.4, abs=0.01)
    assert times.charge(1, 6) == pytest.approx(0.3, abs=0.01)
    assert times.charge(1, 2) == pytest.approx(0.1, abs=0.01)
    times.record(16, 16, 8.0)
    assert times.charge(16, 16) == pytest.approx(16.0, abs=0.01)  # each of sixteen requests waits one step longer
    times.record(1, 0, 100.0)  # one slow step has a small effect, which ends at once
    assert times.charge(1, 8) == pytest.approx(0.27, abs=0.02)
    times.record(1, 0, 1.0)
    assert times.charge(1, 8) == pytest.approx(0.37, abs=0.02)


def test_a_slow_beginning_keeps_nobody_from_guessing() -> None:
    """First runs are slow: the first step with guesses, and all first steps of a process."""
    times = StepTimes()
    times.record(1, 0, 1.0)
    times.record(1, 4, 9.0)
    assert times.charge(1, 4) == pytest.approx(FIRST - 1)
    for _ in range(3):
        times.record(1, 4, 9.0)
    assert times.charge(1, 4) > 2, "the next ones are believed"
    for _ in range(9):
        times.record(1, 0, 0.9 * SLOWER)
    assert times.charge(1, 4) < 1, "they are void where plain steps have become faster"
    assert times.most(1) == 1


class Clock:
    """StepTimes with simulated durations instead of measured ones: 1 per decoding sequence, and `per_guess` per
    guess."""

    def __init__(self, per_guess: float, **options: float) -> None:
        self.times, self.per_guess = StepTimes(**options), per_guess

    def record(self, decodes: int, guesses: int, seconds: float) -> None:
        self.times.record(decodes, guesses, decodes + self.per_guess * guesses)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.times, name)


@pytest.mark.parametrize("right", [0.0, 0.5])
def test_where_guesses_cost_as_much_as_tokens_nobody_drafts_for_long(make_llm: MakeLLM, right: float) -> None:
    """In a batch of eight whose steps take a time proportional to their tokens, guessing costs at most 3 % and the
    first probes."""
    llm = make_llm(Oracle(right), adaptive=True, max_batch_size=8, num_blocks=400, max_logit_rows=64)
    llm.loop.speculator.accounts.times = Clock(1.0)
    prompts, params = [[i, 1, 2] for i in range(8)], SamplingParams(max_tokens=60, ignore_eos=True)
    assert llm.generate(prompts, params) == make_llm(num_blocks=400).generate(prompts, params)
    spent = sum(batch.num_tokens for batch in llm.executor.batches)
    assert spent < 8 * 3 + 8 * 59 * 1.03 + 8 * 2


class Follower(Oracle):
    """Follows every step, which takes `seconds`. forgotten: the number of calls of `forget`."""

    follows = True

    def __init__(self, right: float, seconds: float) -> None:
        super().__init__(right)
        self.seconds, self.followed, self.forgotten = seconds, 0, 0

    def follow(self, batch: ScheduledBatch, generations: Mapping[int, Generation]) -> None:
        self.followed += len(generations)
        sleep(self.seconds)

    def forget(self, request_id: int) -> None:
        self.forgotten += 1


def test_a_request_that_cannot_pay_for_being_followed_is_followed_no_more(make_llm: MakeLLM) -> None:
    """Its account pays even if it never drafts; the tokens stay the same."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    plain = make_llm().generate([[1, 2], [3, 4, 5]], params)
    for speculative in (True, False):
        costly = Follower(0.0, 0.02)
        llm = make_llm(costly, adaptive=True)
        chosen = replace(params, speculative=speculative)
        assert [llm.generate([prompt], chosen)[0] for prompt in ([1, 2], [3, 4, 5])] == plain
        assert costly.followed < 20 and costly.forgotten == 4  # both requests: lost, and ended
    cheap = Follower(1.0, 0.0)
    llm = make_llm(cheap, adaptive=True)
    llm.loop.speculator.accounts.times = Clock(0.01)
    assert llm.generate([[1, 2], [3, 4, 5]], params) == plain
    assert cheap.forgotten == 2 and llm.loop.speculator.counts.accepted > 60


class Late(Oracle):
    """Its first two drafts are wrong, all later ones are right."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.asked = 0

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        self.asked += 1
        found = {}
        for wish in wishes:
            text = [*wish.generation.prompt, *wish.generation.token_ids]
            for _ in range(wish.count):
                text.append((context_hash(text, VOCAB) + (self.asked < 3)) % VOCAB)
            found[wish.generation.request_id] = Proposal(Draft.chain(text[-wish.count :]), (0.6,) * wish.count)
        return found


def test_who_paused_drafts_again_though_steps_run_ahead(make_llm: MakeLLM) -> None:
    """A device gets the next step while no request may draft; the pause must end nevertheless."""
    drafter = Late()
    llm = make_llm(drafter, adaptive=True)
    llm.loop.speculator.accounts.times = Clock(0.1)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    assert llm.generate([[5, 6]], params) == make_llm().generate([[5, 6]], params)
    counts = llm.loop.speculator.counts
    assert counts.accepted > 10 and counts.tokens == 59
    if isinstance(llm.executor, FakeDevice):
        assert llm.executor.most_under_way == 2, "no step ran ahead"


def test_savings_take_what_was_won_and_lend_once() -> None:
    savings, winner, loser = Savings(), Account(0.6), Account(0.6)
    assert not savings.lend(loser)
    winner.settle(16, 16, 16, 4.0)
    savings.collect(winner)
    assert winner.balance == MOST_SAVED and savings.balance == pytest.approx(CREDIT + 12 - MOST_SAVED)
    savings.collect(winner, CREDIT)  # it ends
    assert savings.balance == pytest.approx(12.0)
    assert savings.lend(loser)
    assert loser.balance == CREDIT + LOAN and savings.balance == pytest.approx(12.0 - LOAN)
    assert not savings.lend(loser)


class Reader(Drafter):
    """Reads each text before it can guess for it, which takes `seconds`."""

    name, first_rate = "reader", 0.9

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.known: set[int] = set()
        self._clock, self._seconds = clock, seconds

    def backlog(self, generation: Generation) -> int:
        return 0 if generation.request_id in self.known else len(generation.prompt)

    def read(self, generation: Generation) -> None:
        self.known.add(generation.request_id)
        self._clock[0] += self._seconds

    def propose(self, wishes: Sequence[Wish]) -> dict[int, Proposal]:
        assert {wish.generation.request_id for wish in wishes} <= self.known
        return {}


def test_texts_are_read_where_somebody_can_pay(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading for twenty seconds costs twenty tokens: more than a request owns, so that savings must pay, if they
    suffice."""
    now = [0.0]
    monkeypatch.setattr("icc.runtime.speculate.speculator.perf_counter", lambda: now[0])
    drafter = Reader(now, 20.0)
    llm = make_llm(drafter, adaptive=True)
    speculator = llm.loop.speculator
    assert speculator is not None
    speculator.accounts.times = Clock(0.2, slope=0.2)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for savings, reads in ((0.0, 0), (50.0, 1), (10.0, 1), (25.0, 2)):
        speculator.accounts.savings.balance = savings
        llm.generate([list(range(30))], params)
        assert len(drafter.known) == reads
        spent = savings - speculator.accounts.savings.balance
        assert -1.0 < spent - (20.0 if savings > 20 else 0.0) < 0.1
