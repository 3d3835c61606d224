"""PromptScores: log-probabilities of a prompt's own tokens, reduced chunk by chunk as the logits come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..loop.sampler import TokenLogprob, token_logprob


class PromptScores:
    """Collects the logits of one scoring request; a row predicts the token after it, so the last row is not needed."""

    def __init__(self, request_id: int, prompt: Sequence[int], top: int) -> None:
        self.request_id = request_id
        self.logprobs: list[TokenLogprob] = []
        self._prompt, self._top, self._rows = prompt, top, 0

    def push(self, chunks: Iterable[np.ndarray]) -> None:
        """Take chunks of logits, float32 `[rows, vocab]`, in order."""
        for chunk in chunks:
            for row in chunk:
                self._rows += 1
                if self._rows < len(self._prompt):
                    self.logprobs.append(token_logprob(row, self._prompt[self._rows], self._top))

    @property
    def complete(self) -> bool:
        return self._rows >= len(self._prompt)
