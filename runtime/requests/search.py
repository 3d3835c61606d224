"""SearchRequest: a request whose completions are found by beam search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..batch.scheduled import StepOutcome, Verdict
from ..errors import RequestError
from ..scheduler.scheduler import Scheduler
from .beam_search import BeamSearch
from .generation import Generation
from .request import Output, Request
from .sampler import SampledToken

if TYPE_CHECKING:
    import numpy as np

TOO_FEW = "too_few"  # the reason if a search found fewer texts than asked for, because a grammar allows no others


class SearchRequest(Request, eq=False, kw_only=True):
    """The request that runs for all completions of a prompt under beam search; they get their tokens when it ends.

    generations: the completions, best first; they are not queued themselves.
    """

    search: BeamSearch
    generations: Sequence[Generation]
    first_token: float | None = None

    def push(self, beam: int, logits: np.ndarray) -> StepOutcome:
        """Take the logits after one beam, float32 `[vocab]`, which are valid only now."""
        try:
            found = self.search.push(beam, logits)
        except Exception as error:  # its grammar failed; other requests continue
            self.fault, found = error, False
        return StepOutcome(self.request_id, None, Verdict.CONTINUE if found else Verdict.ERROR, beam=beam)

    def advance(self, scheduler: Scheduler) -> str | None:
        """Extend the search by one token if the logits of all beams have arrived. Returns the reason if the search
        ends, None if it continues."""
        if not self.search.ready:
            return None
        try:
            choices = self.search.advance()
        except Exception as error:
            self.fault = error
            return "error"
        if not choices:
            found, asked = self.search.finished, len(self.generations)
            if len(found) >= asked:
                return found[0].reason
            words = f"beam search found {len(found)} of the {asked} texts that n asks for: no others are allowed"
            self.fault = RequestError(words, "ask for fewer", "n")
            return TOO_FEW
        self.search.placed(scheduler.branch(self.request_id, choices))
        return None

    def preempt(self) -> None:
        super().preempt()
        self.search.lost()

    def hold(self) -> None:
        super().hold()
        self.search.restart()

    def deliver(self, reason: str | None = None) -> list[Output]:
        """The outputs: none before the end (reason None); at the end all tokens of all completions, best first."""
        if reason is None:
            return []
        self.end(reason)
        found = self.search.best(len(self.generations)) if reason not in ("error", TOO_FEW) else []
        if not self.spec.max_new_tokens:  # all texts are empty
            found = [*found] * len(self.generations)
        outputs: list[Output] = []
        for index, generation in enumerate(self.generations):
            generation.first_token, generation.fault = self.first_token, self.fault
            generation.num_cached_tokens, generation.queued_s = self.num_cached_tokens, self.queued_s
            why = reason
            if index < len(found):
                one = found[index]
                generation.score = one.score
                logprobs = one.logprobs or (None,) * len(one.tokens)
                for token, logprob in zip(one.tokens, logprobs, strict=True):
                    generation.take_one(SampledToken(token, logprob))
                why = one.reason if reason in ("stop", "length") else reason
            outputs += generation.deliver(why)
        return outputs
