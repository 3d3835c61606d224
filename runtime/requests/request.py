"""Request: one record per request, from its arrival at the engine loop to its end.

           queue            run               guess
    NEW ----------> WAITING ----> RUNNING -----------> GUESSING
     |   HELD ------>  |   <------   |    <-----------    |
     |    ^ queue      |   preempt   |       settle       |
     |    |            |             |                    |
     +----+---hold-----+-------------+--------------------+
     |    |            |             |                    |
     +----+---end------+-------------+--------------------+----> ENDED

`hold` leads to HELD from every state but that and ENDED, `end` to ENDED from everywhere.

A request waits with the scheduler until it is admitted to the batch, and again after it was preempted. A step may
verify guesses of it. After a failed step, all requests that are not on trial are held: none may run beside the
suspects, of which the culprit ends. A request ends once, from any state: by its own tokens, by an error, or because it
is cancelled or past its deadline. Only `RequestTable` changes a request's state, and keeps the scheduler consistent
with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from ..batch.scheduled import NO_EXTRAS, Extras
from ..scheduler.request import RequestSpec
from .sampler import TokenLogprob


class State(Enum):
    """The state of a request; see the module's docstring."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    GUESSING = "guessing"
    HELD = "held"
    ENDED = "ended"


class IllegalTransition(RuntimeError):
    """A transition that a request's state does not allow: a bug."""


class Standing(msgspec.Struct, frozen=True):
    """The facts that decide the order of requests and which KV blocks they share. priority: lower numbers run first.
    client: an API key; clients of equal priority get equal shares. Only requests with the same salt and equal extras
    share KV blocks. extras: inputs per token besides ids, see `ScheduledSequence.extras`. adapter: an id of the
    request's adapter, b"" for none; unlike a slot, an id is never used again. adapter_from: the first token that is
    computed with the adapter; blocks before it are shared with requests without adapters. first_turn: how many of the
    first tokens other requests probably share; 0: derive it from the prompt."""

    priority: int = 0
    client: str = ""
    salt: bytes = b""
    extras: Extras = NO_EXTRAS
    adapter: bytes = b""
    adapter_from: int = 0
    first_turn: int = 0


class Output(NamedTuple):
    """At most one token that a step gave to one request, and the text that became safe to show. stop: the stop string
    that ended it; None if none did. score: set in the last output of a beam search's text, see Completion; else
    None."""

    request_id: int
    token_id: int | None
    text: str = ""
    logprob: TokenLogprob | None = None
    finish_reason: str | None = None
    stop: str | None = None
    score: float | None = None


class Request(msgspec.Struct, eq=False, kw_only=True):
    """The base of all requests, those that sample (Generation) and those that are scored (ScoreRequest).

    spec: the request as the scheduler gets it.
    arrival: when it arrived, in seconds of `time.perf_counter`.
    num_cached_tokens: how many tokens of the prompt were in the prefix cache; None before the first step.
    queued_s: seconds from the arrival to the first step; 0 before it.
    fault: the exception that ended it with "error"; None if the model's logits were not numbers, and before the end.
    """

    spec: RequestSpec
    arrival: float = msgspec.field(default_factory=time.perf_counter)
    request_id: int = -1
    state: State = State.NEW
    num_cached_tokens: int | None = None
    queued_s: float = 0.0
    finished: float | None = None
    finish_reason: str | None = None
    fault: Exception | None = None

    def __post_init__(self) -> None:
        self.request_id = self.spec.request_id

    @property
    def prompt(self) -> tuple[int, ...]:
        """The token ids of its prompt."""
        return self.spec.token_ids

    @property
    def sampled(self) -> Sequence[int]:
        """Its tokens after the prompt, with which it is queued again."""
        return ()

    @property
    def has_all_tokens(self) -> bool:
        """Whether it has its last token, even if the scheduler has not reported this yet."""
        return False

    def queue(self) -> None:
        """Change to WAITING: it is queued with the scheduler."""
        self._become(State.WAITING, State.NEW, State.HELD)

    def run(self, num_cached: int) -> None:
        """Change to RUNNING: it is admitted to the batch, with `num_cached` tokens from the prefix cache."""
        self._become(State.RUNNING, State.WAITING)
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_cached
            self.queued_s = time.perf_counter() - self.arrival

    def preempt(self) -> None:
        """Change to WAITING: it loses its place in the batch."""
        self._become(State.WAITING, State.RUNNING)

    def guess(self) -> None:
        """Change to GUESSING: the current step verifies guesses of it."""
        self._become(State.GUESSING, State.RUNNING)

    def settle(self) -> None:
        """Change to RUNNING after a step, whether it had guesses or not."""
        if self.state is State.GUESSING:
            self._become(State.RUNNING, State.GUESSING)

    def hold(self) -> None:
        """Change to HELD, while others are on trial; its computed KV is lost."""
        self._become(State.HELD, State.NEW, State.WAITING, State.RUNNING, State.GUESSING)

    def deliver(self, reason: str | None = None) -> list[Output]:
        """The outputs of steps since the last call. reason: ends the request; None: it continues."""
        if reason is not None:
            self.end(reason)
        return []

    def end(self, reason: str) -> None:
        """Change to ENDED, the last state."""
        self._become(State.ENDED, State.NEW, State.WAITING, State.RUNNING, State.GUESSING, State.HELD)
        self.finish_reason = reason
        self.finished = time.perf_counter()

    def _become(self, state: State, *sources: State) -> None:
        if self.state not in sources:
            raise IllegalTransition(f"request {self.request_id}: {self.state.value} -> {state.value}")
        self.state = state
