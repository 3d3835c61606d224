"""Prompts: what the HTTP process has asked for and the engine has not answered yet.

    ARRIVED --compile--> COMPILING --run--> RUNNING --> ENDED
    ARRIVED --run-------------------------> RUNNING

A prompt waits to be taken up. If it has a grammar, that is compiled beside the steps, as the KV of its beginning is
read that lies on disk; then it runs as a task of the loop's driver. It ends when nothing more comes of it, when it is
refused, and, in whatever stage it is, when it is cancelled or past its deadline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush

from ...loop.driver import EngineTask
from ...requests.request import IllegalTransition
from .messages import Submit


class PromptStage(Enum):
    """Where a prompt is; see the module."""

    ARRIVED = "arrived"
    COMPILING = "compiling"
    RUNNING = "running"
    ENDED = "ended"


_BEFORE: dict[PromptStage, tuple[PromptStage, ...]] = {
    PromptStage.COMPILING: (PromptStage.ARRIVED,),
    PromptStage.RUNNING: (PromptStage.ARRIVED, PromptStage.COMPILING),
    PromptStage.ENDED: (PromptStage.ARRIVED, PromptStage.COMPILING, PromptStage.RUNNING),
}


@dataclass(slots=True, eq=False, kw_only=True)
class Prompt(EngineTask):
    """A prompt under way. begun: the indices of its completions of which anything was reported."""

    submit: Submit
    stage: PromptStage = PromptStage.ARRIVED
    begun: set[int] = field(default_factory=set)

    @property
    def id(self) -> int:
        """The number of the request, by which the worker's answers name it."""
        return self.submit.id


class PromptTable:
    """The owner of all prompts: they come with `arrive`, change their stage here, and go with `end`. embeds: whether
    the engine makes vectors of them."""

    def __init__(self, embeds: bool = False) -> None:
        self._embeds = embeds
        self._stages: dict[PromptStage, dict[int, Prompt]] = {
            stage: {} for stage in PromptStage if stage is not PromptStage.ENDED
        }
        self._deadlines: list[tuple[float, int]] = []  # a heap; of prompts that have ended, too

    def arrive(self, submit: Submit, now: float) -> None:
        """A prompt comes, at `now` by a clock whose seconds its deadline counts."""
        scored = None if self._embeds else submit.prompt_logprobs
        query, standing = submit.query(self._embeds), submit.standing
        self._stages[PromptStage.ARRIVED][submit.id] = Prompt(query, standing, scored=scored, submit=submit)
        if submit.deadline is not None:
            heappush(self._deadlines, (now + submit.deadline, submit.id))

    def compile(self, prompt: Prompt) -> None:
        """Its grammar is being compiled, or its beginning read."""
        self._move(prompt, PromptStage.COMPILING)

    def run(self, prompt: Prompt) -> None:
        """It is a task of the driver's."""
        self._move(prompt, PromptStage.RUNNING)

    def end(self, prompt: Prompt) -> None:
        """Nothing more is reported of it. What the engine loop has of it is for the caller to end."""
        self._move(prompt, PromptStage.ENDED)
        if not any(self._stages.values()):
            self._deadlines.clear()

    def _move(self, prompt: Prompt, stage: PromptStage) -> None:
        if prompt.stage not in _BEFORE.get(stage, ()):
            raise IllegalTransition(f"prompt {prompt.id}: {prompt.stage.value} -> {stage.value}")
        del self._stages[prompt.stage][prompt.id]
        prompt.stage = stage
        if stage is not PromptStage.ENDED:
            self._stages[stage][prompt.id] = prompt

    # -- who is where ------------------------------------------------------------------------------------------------

    def find(self, prompt_id: int) -> Prompt | None:
        """A prompt that has not ended; None if there is none of this id."""
        return next((found for stage in self._stages.values() if (found := stage.get(prompt_id)) is not None), None)

    def all_in(self, stage: PromptStage) -> list[Prompt]:
        """The prompts of a stage, in the order in which they came to it."""
        return list(self._stages[stage].values())

    def arrived(self, most: int) -> Iterator[Prompt]:
        """The first that wait to be taken up, each until it has left its stage."""
        waiting = self._stages[PromptStage.ARRIVED]
        for _ in range(min(most, len(waiting))):
            yield next(iter(waiting.values()))

    def count(self, stage: PromptStage) -> int:
        """How many prompts are in a stage."""
        return len(self._stages[stage])

    def late(self, now: float) -> Iterator[Prompt]:
        """The prompts whose deadline is over and that have not ended. now: seconds, by the clock of `arrive`."""
        while self._deadlines and self._deadlines[0][0] <= now:
            found = self.find(heappop(self._deadlines)[1])
            if found is not None:
                yield found
