"""The life of requests: each accepted one ends exactly once, in any sequence of events, and leaves nothing behind."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from icc.runtime.batch.scheduled import ScheduledBatch
from icc.runtime.errors import IccError, RequestError
from icc.runtime.format.manifest import EmbeddingFacts, Manifest
from icc.runtime.kv.sequence import slot_of
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeDevice, FakeExecutor, context_hash
from icc.runtime.requests.params import SamplingParams
from icc.runtime.requests.request import IllegalTransition, Request, State
from icc.runtime.scheduler.request import RequestSpec
from icc.runtime.server.engine.messages import (
    Cancel,
    Delta,
    Embedded,
    Failed,
    PromptLogprobs,
    Report,
    Submit,
)
from icc.runtime.server.engine.prompts import PromptStage, PromptTable
from icc.runtime.server.engine.worker import Constrain, GrammarService, Worker
from icc.runtime.speculate.speculator import Speculator
from oracle_drafters import Oracle

from .conftest import toy_manifest

VOCAB = 64
TRANSITIONS: dict[str, tuple[set[State], State]] = {
    "queue": ({State.NEW, State.HELD}, State.WAITING),
    "run": ({State.WAITING}, State.RUNNING),
    "preempt": ({State.RUNNING}, State.WAITING),
    "guess": ({State.RUNNING}, State.GUESSING),
    "hold": ({State.NEW, State.WAITING, State.RUNNING, State.GUESSING}, State.HELD),
    "end": (set(State) - {State.ENDED}, State.ENDED),
}
PATHS: dict[State, list[str]] = {
    State.NEW: [],
    State.WAITING: ["queue"],
    State.RUNNING: ["queue", "run"],
    State.GUESSING: ["queue", "run", "guess"],
    State.HELD: ["hold"],
    State.ENDED: ["end"],
}


def move(request: Request, transition: str) -> None:
    arguments = {"run": (0,), "end": ("abort",)}.get(transition, ())
    getattr(request, transition)(*arguments)


@pytest.mark.parametrize(("state", "transition"), list(itertools.product(State, TRANSITIONS)))
def test_a_request_goes_where_the_diagram_says_and_nowhere_else(state: State, transition: str) -> None:
    request = Request(spec=RequestSpec(1, (1,), 1))
    for step in PATHS[state]:
        move(request, step)
    assert request.state is state
    sources, target = TRANSITIONS[transition]
    if state in sources:
        move(request, transition)
        assert request.state is target
    else:
        with pytest.raises(IllegalTransition, match=f"{state.value} -> {target.value}"):
            move(request, transition)
        assert request.state is state


def test_a_prompt_ends_once() -> None:
    prompts = PromptTable()
    prompts.arrive(Submit(1, (1,), SamplingParams()), 0.0)
    prompt = prompts.find(1)
    assert prompt is not None
    prompts.compile(prompt)
    with pytest.raises(IllegalTransition):
        prompts.compile(prompt)
    prompts.run(prompt)
    for illegal in (prompts.compile, prompts.run):
        with pytest.raises(IllegalTransition):
            illegal(prompt)
    prompts.end(prompt)
    assert prompts.find(1) is None
    with pytest.raises(IllegalTransition):
        prompts.end(prompt)


class Wire:
    """A channel without a socket: the next messages for the worker, and the messages it has sent."""

    def __init__(self) -> None:
        self.inbox: list[Any] = []
        self.sent: list[Any] = []

    def receive(self, timeout: float) -> Iterator[Any]:
        messages, self.inbox = self.inbox, []
        return iter(messages)

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Anything:
    """A grammar that allows every token."""

    def allowed(self) -> np.ndarray:
        return np.ones(VOCAB, dtype=bool)

    def accept(self, token_id: int) -> bool:
        return True

    def copy(self) -> Anything:
        return self


class SlowGrammars(GrammarService):
    """Compiles grammars only when `compile` is called."""

    def __init__(self) -> None:
        self.asked: list[Submit] = []
        self.done: list[tuple[Submit, Constrain | IccError]] = []

    def request(self, submit: Submit) -> None:
        if submit.grammar == "refused":
            raise RequestError("no grammar")
        self.asked.append(submit)

    def finished(self) -> list[tuple[Submit, Constrain | IccError]]:
        done, self.done = self.done, []
        return done

    def compile(self) -> None:
        for submit in self.asked:
            wrong = submit.grammar == "wrong"
            self.done.append((submit, RequestError("wrong") if wrong else Anything))
        self.asked.clear()


class Life(RuleBasedStateMachine):
    """The engine process over a fake device, with little memory, guesses, and failing steps."""

    embeds = False

    @initialize(
        device=st.booleans(), guesses=st.booleans(), blocks=st.sampled_from([12, 13, 60]), swap=st.sampled_from([0, 8])
    )
    def start(self, device: bool, guesses: bool, blocks: int, swap: int) -> None:
        options: dict[str, Any] = {"vocab_size": VOCAB, "rule": context_hash, "num_blocks": blocks, "host_blocks": swap}
        self.executor = (FakeDevice if device else FakeExecutor)(max_batch_size=4, max_step_tokens=12, **options)
        self.real_step = self.executor.step
        self.executor.step = self.step_or_fail  # type: ignore[method-assign]
        self.failures: set[int] = set()  # prompts that begin with these tokens fail
        self.faults = 0  # number of next steps that fail for any request
        manifest = toy_manifest(vocab_size=VOCAB, max_seq_len=48)
        speculator = Speculator(Oracle(0.7, rule=hash_rule), adaptive=False) if guesses else None
        self.llm = LLM(self.manifest(manifest), self.executor, speculator=None if self.embeds else speculator)
        self.wire, self.grammars = Wire(), SlowGrammars()
        self.worker = Worker(self.llm, self.wire, self.grammars)  # type: ignore[arg-type]
        self.llm.loop.on_fault = lambda error: None
        self.next_id = 0
        self.open: dict[int, Submit] = {}
        self.cancelled: set[int] = set()
        self.ends: Counter[tuple[int, int]] = Counter()

    def manifest(self, manifest: Manifest) -> Manifest:
        return manifest

    def step_or_fail(self, batch: ScheduledBatch) -> np.ndarray:
        logits = self.real_step(batch)
        slots = [slot_of(s.block_tables[0], 0, self.executor.groups[0].block_size) for s in batch.sequences]
        if self.faults > 0 and batch.sequences[0].request_id >= 0:
            self.faults -= 1
            raise OSError("a fault that goes away")
        if (
            self.failures & {int(self.executor.caches[0].reshape(-1)[slot]) for slot in slots}
            and batch.sequences[0].request_id >= 0
        ):
            raise OSError("the device fails on this request")
        return logits

    # -- what happens ------------------------------------------------------------------------------------------------

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=48),
        tokens=st.integers(1, 30),
        n=st.integers(1, 3),
        kind=st.sampled_from(["plain", "plain", "plain", "scored", "grammar", "wrong", "refused", "invalid"]),
        deadline=st.sampled_from([None, None, None, 0.0, 1e-3, 60.0]),
        seed=st.sampled_from([None, 1]),
        beams=st.sampled_from([1, 1, 3]),
    )
    def submit(
        self, prompt: list[int], tokens: int, n: int, kind: str, deadline: float | None, seed: int | None, beams: int
    ) -> None:
        self.next_id += 1
        beams = 1 if self.embeds else beams
        temperature = 0.0 if seed is None or beams > 1 else 1.0
        params = SamplingParams(max_tokens=tokens, n=1 if self.embeds else n, temperature=temperature, beams=beams)
        self.open[self.next_id] = submit = Submit(
            self.next_id,
            (VOCAB + 1,) if kind == "invalid" else tuple(prompt),
            params,
            priority=self.next_id % 3,
            client=str(self.next_id % 2),
            grammar=kind if kind in ("grammar", "wrong", "refused") else "",
            prompt_logprobs=1 if kind == "scored" else None,
            deadline=deadline,
        )
        self.wire.inbox.append(submit)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        found = data.draw(st.sampled_from(sorted(self.open)))
        self.cancelled.add(found)
        self.wire.inbox.append(Cancel(found))

    @rule(turns=st.integers(1, 6))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.worker._turn()
            self.read()

    @rule()
    def compile_grammars(self) -> None:
        self.grammars.compile()

    @rule(steps=st.integers(1, 3))
    def fail_for_a_while(self, steps: int) -> None:
        self.faults = steps

    @rule(first=st.integers(0, VOCAB - 1))
    def fail_on(self, first: int) -> None:
        """Let requests with one of two first tokens fail; culprits can be found only if other requests succeed."""
        self.failures = {first, (first + 1) % VOCAB}

    @rule()
    def fail_no_more(self) -> None:
        self.failures = set()

    # -- what must hold ----------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Check the worker's messages against the requests."""
        for message in self.wire.sent:
            if isinstance(message, Failed):
                assert message.id in self.open, "it has ended"
                for index in range(self.open[message.id].params.n):
                    self.end(message.id, index)
            elif isinstance(message, Report):
                for delta in message.deltas:
                    self.take(delta)
            elif isinstance(message, PromptLogprobs | Embedded):
                assert message.id in self.open
        self.wire.sent.clear()
        for found in [i for i in self.cancelled & self.open.keys() if not any(m.id == i for m in self.wire.inbox)]:
            assert self.worker.prompts.find(found) is None, "it was cancelled"
            del self.open[found]

    def take(self, delta: Delta) -> None:
        assert delta.id in self.open and not self.ends[delta.id, delta.index], "nothing comes after the end"
        if delta.reason is not None:
            assert delta.reason in ("stop", "length", "error", "deadline")
            self.end(delta.id, delta.index)

    def end(self, submit_id: int, index: int) -> None:
        self.ends[submit_id, index] += 1
        assert self.ends[submit_id, index] == 1
        if all(self.ends[submit_id, i] for i in range(self.open[submit_id].params.n)):
            del self.open[submit_id]

    @invariant()
    def the_table_and_the_scheduler_agree(self) -> None:
        requests, scheduler = self.llm.loop.requests, self.llm.loop.scheduler
        scheduler.check()
        running = {request.id for request in scheduler.queues.running}  # all beams of a request run, or wait, together
        waiting = {request.id for request in scheduler.queues.waiting}
        for request in requests.live.values():
            where = {
                State.WAITING: waiting,
                State.RUNNING: running,
                State.HELD: requests.live.keys() - running - waiting,
            }
            assert request.request_id in where[request.state], request.state
        assert running | waiting <= requests.live.keys()
        assert all(requests.trial.running for r in requests.live.values() if r.state is State.HELD)

    @invariant()
    def every_request_belongs_to_a_prompt(self) -> None:
        prompts = self.worker.prompts
        owned = [
            request.request_id
            for prompt in prompts.all_in(PromptStage.RUNNING)
            for request in dict.fromkeys(getattr(request, "search", None) or request for request in prompt.requests)
            if request.state is not State.ENDED
        ]
        assert sorted(owned) == sorted(self.llm.loop.requests.live)
        arrived = {message.id for message in self.wire.inbox if isinstance(message, Submit)}
        here = {
            prompt.id for stage in PromptStage if stage is not PromptStage.ENDED for prompt in prompts.all_in(stage)
        }
        assert here - self.cancelled == self.open.keys() - arrived - self.cancelled

    def teardown(self) -> None:
        """Let all requests end, and check that nothing is left."""
        if not hasattr(self, "worker"):
            return
        for _ in range(2000):
            self.grammars.compile()
            self.worker._turn()
            self.read()
            if not self.open and not self.wire.inbox:
                break
        assert not self.open, "somebody has not ended"
        loop, prompts = self.llm.loop, self.worker.prompts
        assert loop.step() == []  # a trial ends when another request would run after it
        driver = self.worker._driver
        assert not any(prompts._stages.values()) and not prompts._deadlines
        assert not driver._generating and not driver._reading and not self.worker._deltas
        assert not loop.requests.live and not loop.scheduler.has_work() and not loop.requests.trial.running
        assert loop.scheduler.kv.is_idle
        assert loop.speculator is None or not loop.speculator.accounts._accounts


class EmbeddingLife(Life):
    """Life in an engine that embeds."""

    embeds = True

    def manifest(self, manifest: Manifest) -> Manifest:
        return msgspec.structs.replace(manifest, embedding=EmbeddingFacts("mean", True, VOCAB))


def hash_rule(tokens: Any, vocab: int) -> int:
    """The fake model's next token. Ignores `vocab`, as the oracle passes that of a larger vocabulary."""
    return context_hash(tokens, VOCAB)


EXAMPLES, STEPS = map(int, os.environ.get("ICC_LIFECYCLE", "40x30").split("x"))  # `make soak` may ask for more
SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestLife: Callable[..., Any] = Life.TestCase
TestLife.settings = SETTINGS  # type: ignore[attr-defined]
TestEmbeddingLife: Callable[..., Any] = EmbeddingLife.TestCase
TestEmbeddingLife.settings = settings(SETTINGS, max_examples=EXAMPLES // 2)  # type: ignore[attr-defined]
