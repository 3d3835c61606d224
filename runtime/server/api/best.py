"""The best of several answers: those that a judge scores highest, or the likeliest per token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from ..engine.messages import Delta, merge
from .jobs import Job

_LEAST_S = 1.0  # the time that a judge has at least: answers that a deadline ended are judged, too


class Judge(Protocol):
    """Scores answers."""

    async def start(self) -> None:
        """Load the judge. IccError if it cannot be loaded."""
        ...

    async def stop(self) -> None:
        """Release the judge's resources."""
        ...

    def check(self) -> None:
        """Asked before answers are generated. IccError if they could not be scored now."""
        ...

    async def scores(self, question: str, answers: Sequence[str], seconds: float | None = None) -> list[float]:
        """A number for each answer to the question, the higher the better. seconds: how long it may take, None for no
        end. HttpError 504 if that was too short."""
        ...


async def best_of(
    job: Job, deltas: Sequence[Delta], judge: Judge | None, end: float | None = None
) -> dict[int, list[int]]:
    """For each prompt of a job, by id, the indices of its `job.best` best completions, the best first. judge None: the
    best have the highest mean log-probability per token. Completions that a deadline ended before their first token
    come last. end: the deadline as `time.monotonic`, None for none; the judge gets a second even if it has passed.
    HttpError 504 if it takes longer."""
    grouped: dict[int, dict[int, list[Delta]]] = {}
    for delta in deltas:
        grouped.setdefault(delta.id, {}).setdefault(delta.index, []).append(delta)
    chosen: dict[int, list[int]] = {}
    for question, (number, answers) in zip(job.questions, sorted(grouped.items()), strict=True):
        whole = [merge(answers[index]) for index in sorted(answers)]
        if judge is None:
            scores = [_likelihood(one) for one in whole]
        else:
            seconds = None if end is None else max(end - time.monotonic(), _LEAST_S)
            scores = await judge.scores(question, [one.text for one in whole], seconds)
        order = sorted(range(len(whole)), key=lambda place: (not whole[place].token_ids, -scores[place]))
        chosen[number] = [whole[place].index for place in order[: job.best]]
    return chosen


def _likelihood(delta: Delta) -> float:
    """The mean log-probability of the completion's tokens."""
    return sum(one.logprob for one in delta.logprobs) / max(len(delta.logprobs), 1)
