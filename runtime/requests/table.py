"""RequestTable: the requests of an engine loop, from their arrival to their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..loop.recovery import Trial
from ..loop.sampler import Constraint
from ..scheduler.request import RequestSpec
from ..scheduler.scheduler import Scheduler
from .generation import Generation, Standing
from .intake import Intake
from .params import SamplingParams
from .scores import Scores


class RequestTable:
    """Who has not ended, and whether they may run: all are queued with the scheduler, or, after a step that failed,
    only the group that is on trial. `scheduler` is set by the loop, which begins anew with another one.

    live: every request that has not ended, in order of arrival. generations: those of them that sample; scores: those
    that score, until they are forgotten.
    """

    scheduler: Scheduler

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self.live: dict[int, RequestSpec] = {}
        self.generations: dict[int, Generation] = {}
        self.scores: dict[int, Scores] = {}
        self.trial = Trial()
        self._next_id = 0

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        standing: Standing,
        constrain: Callable[[], Constraint] | None,
    ) -> list[Generation]:
        """Queue the completions of a prompt; see `EngineLoop.add`."""
        self._intake.check_task("generate")
        token_ids, params = self._intake.prompt(prompt), self._intake.params(params)
        room = self._intake.room(token_ids)
        generations = [
            self._intake.generation(self._take_id(), token_ids, params, index, constrain and constrain())
            for index in range(params.n)
        ]
        for generation in generations:
            if room == 0:
                generation.finish("length")
                continue
            limit = min(params.max_tokens, room)
            self._admit(
                RequestSpec(
                    generation.request_id, token_ids, limit, standing.priority, standing.salt, client=standing.client
                )
            )
            self.generations[generation.request_id] = generation
        return generations

    def add_score(self, token_ids: Sequence[int], standing: Standing, last_row: bool = False) -> int:
        """Queue a sequence of which the rows of every position are wanted, or the last one: its id."""
        request_id = self._take_id()
        spec = RequestSpec(
            request_id,
            self._intake.prompt(token_ids),
            0,
            standing.priority,
            standing.salt,
            all_logits=not last_row,
            use_cache=last_row,  # what is cached gives no rows
            client=standing.client,
        )
        self._admit(spec)
        self.scores[request_id] = Scores(time.perf_counter())
        return request_id

    def forget(self, request_id: int) -> bool:
        """The request has ended, or nobody wants it any more. Whether it was there and sampled."""
        self.scheduler.abort(request_id)
        self.trial.clear(request_id)
        self.live.pop(request_id, None)
        return self.generations.pop(request_id, None) is not None

    def next_group(self) -> None:
        """Let the next suspects run, and nobody else; all, if there are no more."""
        for request_id in self.scheduler.request_ids:
            self.scheduler.abort(request_id)
        for request_id in self.trial.next_group(self.live) or self.live:
            generation = self.generations.get(request_id)
            self.scheduler.add(self.live[request_id], () if generation is None else generation.token_ids)

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _admit(self, spec: RequestSpec) -> None:
        """Queue a request, or let it wait while others are on trial. CapacityError if it can never fit."""
        if self.trial.running:
            self.scheduler.validate(spec)
        else:
            self.scheduler.add(spec)
        self.live[spec.request_id] = spec
