"""PromptScores: log-probabilities of a prompt's own tokens, reduced chunk by chunk as the logits come."""

from __future__ import annotations

from .sampler import TokenLogprob, token_logprob
from .scores import ScoreRequest


class PromptScores:
    """A prompt that is under way as the request `scores`; a row predicts the token after it, so the last row is not
    needed. `top`: how many of the likeliest tokens are told of."""

    def __init__(self, scores: ScoreRequest, top: int) -> None:
        self.scores = scores
        self.logprobs: list[TokenLogprob] = []
        self._top, self._rows = top, 0

    def advance(self) -> None:
        """Take in the logits that came since the last call. Raises what ended the request."""
        for chunk in self.scores.take():
            for row in chunk:
                self._rows += 1
                if not self.complete:
                    self.logprobs.append(token_logprob(row, self.scores.prompt[self._rows], self._top))

    @property
    def complete(self) -> bool:
        """Whether every row of the prompt has come."""
        return self._rows >= len(self.scores.prompt)
