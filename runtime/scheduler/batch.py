"""What the scheduler hands to the executor, and what comes back: frozen, plain integers and tuples."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


def pending_token(row: int) -> int:
    """Stands for the token that the step before samples from its logit row `row`; negative, unlike token ids."""
    return -1 - row


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The part of one request that runs in a step.

    `token_ids` take positions `start .. start + len(token_ids) - 1`; the KV of everything before `start` is in the
    cache. Position p lives in block `block_table[p // block_size]` at offset `p % block_size`. The logits of the last
    `num_logits` tokens are wanted (0: the chunk ends before the sequence does).
    """

    request_id: int
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    num_logits: int

    @property
    def end(self) -> int:
        """Tokens in the cache after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step. Logit rows come in the order of the sequences."""

    sequences: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def num_logit_rows(self) -> int:
        return sum(sequence.num_logits for sequence in self.sequences)


class Verdict(Enum):
    """What follows from a step's logits for one request."""

    CONTINUE = "continue"
    STOP = "stop"
    ERROR = "error"  # its logits are not numbers: its KV must not be reused


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What was sampled for one request whose logits the step gave. `token_id` is None if nothing was sampled."""

    request_id: int
    token_id: int | None
    verdict: Verdict = Verdict.CONTINUE


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that ended. `reason` is "stop", "length", "error" or "abort"."""

    request_id: int
    reason: str
