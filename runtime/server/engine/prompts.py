"""Prompts: what the HTTP process has asked for and the engine has not answered yet.

    ARRIVED --compile--> COMPILING --generate--> GENERATING --> ENDED
    ARRIVED --read-----> READING ---generate--> GENERATING      (READING, of an engine that embeds, --> ENDED)
                         READING ---compile---> COMPILING
    ARRIVED --generate-------------------------> GENERATING

A prompt waits to be taken up. If it has a grammar, that is compiled beside the steps; if its own log-probabilities or
its vector are wanted, they are read; then its completions, each a Request of the engine loop with states of its own,
are generated. It ends when all of them have, when it is refused, and, in whatever stage it is, when it is cancelled or
past its deadline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush

from ...requests.embedding import PooledRequest
from ...requests.generation import Generation
from ...requests.prompt_logprobs import PromptScores
from ...requests.request import IllegalTransition, Request
from .messages import Submit


class PromptStage(Enum):
    """Where a prompt is; see the module."""

    ARRIVED = "arrived"
    COMPILING = "compiling"
    READING = "reading"
    GENERATING = "generating"
    ENDED = "ended"


_BEFORE: dict[PromptStage, tuple[PromptStage, ...]] = {
    PromptStage.COMPILING: (PromptStage.ARRIVED, PromptStage.READING),
    PromptStage.READING: (PromptStage.ARRIVED,),
    PromptStage.GENERATING: (PromptStage.ARRIVED, PromptStage.COMPILING, PromptStage.READING),
    PromptStage.ENDED: (PromptStage.ARRIVED, PromptStage.COMPILING, PromptStage.READING, PromptStage.GENERATING),
}


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt under way: what is read of it, and its completions, as far as they have not ended."""

    submit: Submit
    stage: PromptStage = PromptStage.ARRIVED
    reading: PromptScores | PooledRequest | None = None
    generations: tuple[Generation, ...] = ()

    @property
    def id(self) -> int:
        return self.submit.id

    @property
    def requests(self) -> list[Request]:
        """What the engine loop has of it."""
        return [*self.generations, *([] if self.reading is None else [self.reading.scores])]


@dataclass(slots=True, eq=False)
class RunningCompletion:
    """A completion that has not ended. begun: whether anything of it was reported."""

    prompt: Prompt
    generation: Generation
    begun: bool = False


class PromptTable:
    """The owner of all prompts: they come with `arrive`, change their stage here, and go with `end`."""

    def __init__(self) -> None:
        self._stages: dict[PromptStage, dict[int, Prompt]] = {
            stage: {} for stage in PromptStage if stage is not PromptStage.ENDED
        }
        self._completions: dict[int, RunningCompletion] = {}  # by the loop's request id
        self._deadlines: list[tuple[float, int]] = []  # a heap; of prompts that have ended, too

    def arrive(self, submit: Submit, now: float) -> None:
        """A prompt comes, at `now` by a clock whose seconds its deadline counts."""
        self._stages[PromptStage.ARRIVED][submit.id] = Prompt(submit)
        if submit.deadline is not None:
            heappush(self._deadlines, (now + submit.deadline, submit.id))

    def compile(self, prompt: Prompt) -> None:
        """Its grammar is being compiled."""
        self._move(prompt, PromptStage.COMPILING)
        prompt.reading = None

    def read(self, prompt: Prompt, reading: PromptScores | PooledRequest) -> None:
        """Its own tokens are being read."""
        self._move(prompt, PromptStage.READING)
        prompt.reading = reading

    def generate(self, prompt: Prompt, generations: list[Generation]) -> None:
        """Its completions are under way."""
        self._move(prompt, PromptStage.GENERATING)
        prompt.reading, prompt.generations = None, tuple(generations)
        for generation in generations:
            self._completions[generation.request_id] = RunningCompletion(prompt, generation)

    def end_completion(self, completion: RunningCompletion) -> None:
        """It is reported whole; the prompt ends with its last."""
        del self._completions[completion.generation.request_id]
        prompt = completion.prompt
        if all(generation.request_id not in self._completions for generation in prompt.generations):
            self.end(prompt)

    def end(self, prompt: Prompt) -> None:
        """Nothing more is reported of it. What the engine loop has of it is for the caller to end."""
        self._move(prompt, PromptStage.ENDED)
        for generation in prompt.generations:
            self._completions.pop(generation.request_id, None)
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
        """A prompt that has not ended."""
        return next((found for stage in self._stages.values() if (found := stage.get(prompt_id)) is not None), None)

    def completion(self, request_id: int) -> RunningCompletion | None:
        """A completion that is not reported whole, by the loop's request id."""
        return self._completions.get(request_id)

    @property
    def completions(self) -> list[RunningCompletion]:
        return list(self._completions.values())

    def all_in(self, stage: PromptStage) -> list[Prompt]:
        """The prompts of a stage, in the order in which they came to it."""
        return list(self._stages[stage].values())

    def arrived(self, most: int) -> Iterator[Prompt]:
        """The first that wait to be taken up, each until it has left its stage."""
        waiting = self._stages[PromptStage.ARRIVED]
        for _ in range(min(most, len(waiting))):
            yield next(iter(waiting.values()))

    def count(self, stage: PromptStage) -> int:
        return len(self._stages[stage])

    def late(self, now: float) -> Iterator[Prompt]:
        """The prompts whose deadline is over and that have not ended."""
        while self._deadlines and self._deadlines[0][0] <= now:
            found = self.find(heappop(self._deadlines)[1])
            if found is not None:
                yield found
