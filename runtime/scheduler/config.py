"""SchedulerConfig: the limits that every step and every request must keep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits per step (sequences, tokens, logit rows) and the size of the KV cache (blocks, tokens per block).

    host_blocks: blocks of host memory for the KV of preempted requests; with none, it is computed again.
    """

    max_batch_size: int
    max_step_tokens: int
    max_logit_rows: int
    num_blocks: int
    block_size: int
    host_blocks: int = 0

    def __post_init__(self) -> None:
        # every running request must be able to run one token, or a prefill could starve behind decodes
        assert 1 <= self.max_batch_size <= min(self.max_step_tokens, self.max_logit_rows), self
        assert self.num_blocks >= 1 and self.block_size >= 1 and self.host_blocks >= 0, self
