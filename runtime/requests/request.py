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

A request waits with the scheduler until it is let into the batch, and again after it was preempted. A step may verify
guesses of it. After a step that failed, whoever is not on trial is held: nobody may run beside the suspects, of which
the culprit ends. A request ends once, in whatever state it is: by its own tokens, by an error, or because it is
cancelled or past its deadline. `RequestTable` sees to it that the scheduler agrees; nobody else moves a request.
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
    """Where a request is; see the module."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    GUESSING = "guessing"
    HELD = "held"
    ENDED = "ended"


class IllegalTransition(RuntimeError):
    """A request was to go where it cannot go from where it is: a bug."""


class Standing(msgspec.Struct, frozen=True):
    """What decides the order of requests and which KV blocks they share. A lower priority number runs first, clients
    (API keys) of equal priority get equal shares, and only requests with the same salt and equal extras share KV
    blocks. extras: inputs per token besides ids, see `ScheduledSequence.extras`. adapter: an id of the request's
    adapter, b"" for none; unlike its slot, the id is never used again. adapter_from: the first token that is computed
    with the adapter; blocks before it are shared with requests without one. first_turn: the number of first tokens that
    other requests probably share; 0: found in the prompt."""

    priority: int = 0
    client: str = ""
    salt: bytes = b""
    extras: Extras = NO_EXTRAS
    adapter: bytes = b""
    adapter_from: int = 0
    first_turn: int = 0


class Output(NamedTuple):
    """At most one token that a step gave to one request, and the text that became safe to show. `stop` is the stop
    string that ended it, if one did; `score` comes with the end of what was searched for, see Completion."""

    request_id: int
    token_id: int | None
    text: str = ""
    logprob: TokenLogprob | None = None
    finish_reason: str | None = None
    stop: str | None = None
    score: float | None = None


class Request(msgspec.Struct, eq=False, kw_only=True):
    """What every request has, whether it samples (Generation) or is scored (Scores).

    spec: the request as the scheduler gets it.
    arrival: when it came, in seconds of `time.perf_counter`.
    num_cached_tokens: tokens of the prompt that the prefix cache had; None before the first step.
    queued_s: seconds from the arrival to the first step.
    fault: the exception that ended it with "error"; None where the model's logits were no numbers, and before an end.
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
        """The token ids that it began with."""
        return self.spec.token_ids

    @property
    def sampled(self) -> Sequence[int]:
        """Its tokens behind the prompt, with which it is queued again."""
        return ()

    @property
    def has_all_tokens(self) -> bool:
        """Whether it got its last token, though the scheduler did not come to say so."""
        return False

    def queue(self) -> None:
        """It waits with the scheduler."""
        self._become(State.WAITING, State.NEW, State.HELD)

    def run(self, num_cached: int) -> None:
        """It is let into the batch, with so many tokens found in the prefix cache."""
        self._become(State.RUNNING, State.WAITING)
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_cached
            self.queued_s = time.perf_counter() - self.arrival

    def preempt(self) -> None:
        """It loses its place in the batch and waits again."""
        self._become(State.WAITING, State.RUNNING)

    def guess(self) -> None:
        """The step under way verifies guesses of it."""
        self._become(State.GUESSING, State.RUNNING)

    def settle(self) -> None:
        """The step is over, whether it had guesses or not."""
        if self.state is State.GUESSING:
            self._become(State.RUNNING, State.GUESSING)

    def hold(self) -> None:
        """Others are on trial; what is computed of it is forgotten."""
        self._become(State.HELD, State.NEW, State.WAITING, State.RUNNING, State.GUESSING)

    def deliver(self, reason: str | None = None) -> list[Output]:
        """What steps gave since the last call. With a reason, it ends here."""
        if reason is not None:
            self.end(reason)
        return []

    def end(self, reason: str) -> None:
        """Nothing comes after this."""
        self._become(State.ENDED, State.NEW, State.WAITING, State.RUNNING, State.GUESSING, State.HELD)
        self.finish_reason = reason
        self.finished = time.perf_counter()

    def _become(self, state: State, *sources: State) -> None:
        if self.state not in sources:
            raise IllegalTransition(f"request {self.request_id}: {self.state.value} -> {state.value}")
        self.state = state
