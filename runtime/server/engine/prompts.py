"""PromptTable: the prompts from the HTTP process that have not ended.

    ARRIVED --compile--> COMPILING --run--> RUNNING --> ENDED
    ARRIVED --run-------------------------> RUNNING

A prompt waits in ARRIVED. If it has a grammar to compile, or a prefix whose KV is on disk, that is done beside the
steps, in COMPILING; then it runs as a task of the loop's driver. It ends when its last output was reported, when it is
refused, and, in any stage, when it is cancelled or its deadline has passed.
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
    """The stage of a prompt; see the module."""

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
    """A prompt that has not ended. begun: the indices of its completions with reported output."""

    submit: Submit
    stage: PromptStage = PromptStage.ARRIVED
    begun: set[int] = field(default_factory=set)

    @property
    def id(self) -> int:
        """The id of the Submit, which the messages about the prompt have."""
        return self.submit.id


class PromptTable:
    """All prompts: they are added by `arrive`, change their stage here, and are removed by `end`. embeds: whether the
    engine computes vectors."""

    def __init__(self, embeds: bool = False) -> None:
        self._embeds = embeds
        self._stages: dict[PromptStage, dict[int, Prompt]] = {
            stage: {} for stage in PromptStage if stage is not PromptStage.ENDED
        }
        self._deadlines: list[tuple[float, int]] = []  # a heap of (time, id); includes prompts that have ended

    def arrive(self, submit: Submit, now: float) -> None:
        """Add a prompt. now: seconds, by the clock of deadlines."""
        scored = None if self._embeds else submit.prompt_logprobs
        query, standing = submit.query(self._embeds), submit.standing
        self._stages[PromptStage.ARRIVED][submit.id] = Prompt(query, standing, scored=scored, submit=submit)
        if submit.deadline is not None:
            heappush(self._deadlines, (now + submit.deadline, submit.id))

    def compile(self, prompt: Prompt) -> None:
        """Move a prompt to COMPILING: its grammar is being compiled, or its prefix read from disk."""
        self._move(prompt, PromptStage.COMPILING)

    def run(self, prompt: Prompt) -> None:
        """Move a prompt to RUNNING: it is a task of the driver."""
        self._move(prompt, PromptStage.RUNNING)

    def end(self, prompt: Prompt) -> None:
        """Move a prompt to ENDED: nothing more is reported of it. The caller must end its requests in the engine
        loop."""
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

    # -- queries -----------------------------------------------------------------------------------------------------

    def find(self, prompt_id: int) -> Prompt | None:
        """The prompt of this id that has not ended; None if there is none."""
        return next((found for stage in self._stages.values() if (found := stage.get(prompt_id)) is not None), None)

    def all_in(self, stage: PromptStage) -> list[Prompt]:
        """The prompts of a stage, in the order in which they entered it."""
        return list(self._stages[stage].values())

    def arrived(self, most: int) -> Iterator[Prompt]:
        """The first `most` prompts in ARRIVED; the caller must move each to another stage before it asks for the
        next."""
        waiting = self._stages[PromptStage.ARRIVED]
        for _ in range(min(most, len(waiting))):
            yield next(iter(waiting.values()))

    def count(self, stage: PromptStage) -> int:
        """How many prompts are in a stage."""
        return len(self._stages[stage])

    def late(self, now: float) -> Iterator[Prompt]:
        """The prompts past their deadline that have not ended. now: seconds, by the clock of `arrive`."""
        while self._deadlines and self._deadlines[0][0] <= now:
            found = self.find(heappop(self._deadlines)[1])
            if found is not None:
                yield found
