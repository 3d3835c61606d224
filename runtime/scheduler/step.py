"""The step under construction: its tokens by request, within budgets of tokens and logit rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..batch.scheduled import ScheduledSequence, pending_token
from .request import ScheduledRequest


class StepBudget:
    """The step under construction, and the rest of its budgets."""

    def __init__(self, tokens: int, logit_rows: int, whole: bool = False) -> None:
        """whole: whether a request must run all of its tokens in one step."""
        self._whole = whole
        self.tokens = tokens
        self.logit_rows = logit_rows
        self.sequences: list[ScheduledSequence] = []

    def has_room(self) -> bool:
        """Whether one more token with a row of logits fits."""
        return self.tokens > 0 and self.logit_rows > 0

    def chunk(self, request: ScheduledRequest) -> int:
        """How many of the request's remaining tokens the budgets allow; may be 0."""
        if not self.has_room():
            return 0
        count = min(request.num_unscheduled, self.tokens)
        count = min(count, self.logit_rows) if request.spec.all_logits else count
        return 0 if self._whole and count < request.num_unscheduled else count

    def add(self, request: ScheduledRequest, count: int) -> None:
        """Schedule `count` of its remaining tokens, no more than `chunk` allows, and its draft. Its tables must be long
        enough for them."""
        if count <= 0:
            return
        start = request.num_started_tokens
        if request.spec.all_logits:
            num_logits = count
        else:
            num_logits = int(count == request.num_unscheduled and not request.folded)
        request.num_scheduled_tokens += count
        self.tokens -= count
        self.logit_rows -= num_logits
        token_ids = tuple(request.tokens[start : start + count])
        if request.draft is not None:
            self.tokens -= len(request.draft)
            self.logit_rows -= len(request.draft)
            token_ids += request.draft.token_ids
            num_logits += len(request.draft)
        self.sequences.append(
            ScheduledSequence(
                request.id,
                token_ids,
                start,
                request.frozen_tables(),
                num_logits,
                request.draft,
                request.spec.first_row,
                len(request.spec.token_ids),
                request.spec.extras,
                request.beam,
            )
        )

    def add_pending(self, requests: Sequence[ScheduledRequest], rows: Mapping[int, int]) -> None:
        """Schedule the tokens that the step in flight samples for these requests. rows: its logit rows, by request
        id."""
        for request in requests:
            request.num_scheduled_tokens += 1
            number = request.spec.request_id
            token, start, prompt = (pending_token(rows[number]),), len(request.tokens), len(request.spec.token_ids)
            tables, extras = request.frozen_tables(), request.spec.extras
            self.sequences.append(ScheduledSequence(number, token, start, tables, 1, None, False, prompt, extras))
        self.tokens -= len(requests)
        self.logit_rows -= len(requests)
