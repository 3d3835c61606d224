"""Scores: a request that samples nothing but collects rows: logits, or hidden states to embed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..batch.scheduled import StepOutcome, Verdict
from ..errors import IccError
from .request import Request

if TYPE_CHECKING:
    import numpy as np
else:
    from ..late import np


class NotFinite(IccError):
    """The model computed NaN or infinite values for a request."""


class ScoreRequest(Request, eq=False, kw_only=True):
    """Collects chunks of rows, float32 `[rows, vocab]` or `[rows, dimension]`, until they are taken.

    finite: whether rows that are not finite end the request. A request that was preempted or restarted computes its
    first rows again; they are dropped here.
    """

    finite: bool = False
    _chunks: list[np.ndarray] = msgspec.field(default_factory=list)
    _given: int = 0  # rows received so far

    def push(self, rows: np.ndarray, start: int) -> StepOutcome:
        """Copy rows `[rows, width]`, which are valid only now, of the tokens from index `start` on."""
        if self.finite and not np.isfinite(rows).all():  # no other request shares its KV
            self.fault = NotFinite("the model failed on this request: its hidden states are not numbers")
            return StepOutcome(self.request_id, None, Verdict.ERROR)
        new = rows[max(self._given - start, 0) :]
        if len(new):
            self._chunks.append(new.copy())
            self._given += len(new)
        return StepOutcome(self.request_id, None)

    def take(self) -> list[np.ndarray]:
        """The chunks, `[rows, width]` each, that arrived since the last call. Raises the error that ended the
        request."""
        if self.fault is not None:
            raise self.fault
        chunks, self._chunks = self._chunks, []
        return chunks
