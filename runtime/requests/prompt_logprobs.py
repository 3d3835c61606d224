"""PromptScores: log-probabilities of a prompt's own tokens, computed chunk by chunk as the logits arrive."""

from __future__ import annotations

from .sampler import TokenLogprob, token_logprob
from .scores import ScoreRequest


class PromptScores:
    """A prompt that is read by the request `scores`. A row predicts the next token, so the last row is not needed. top:
    how many of the likeliest tokens to report."""

    def __init__(self, scores: ScoreRequest, top: int) -> None:
        self.scores = scores
        self.logprobs: list[TokenLogprob] = []
        self._top, self._rows = top, 0

    def advance(self) -> None:
        """Take in the logits that arrived since the last call. Raises the error that ended the request."""
        for chunk in self.scores.take():
            for row in chunk:
                self._rows += 1
                if not self.complete:
                    self.logprobs.append(token_logprob(row, self.scores.prompt[self._rows], self._top))

    @property
    def complete(self) -> bool:
        """Whether all rows of the prompt have arrived."""
        return self._rows >= len(self.scores.prompt)
