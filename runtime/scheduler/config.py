"""SchedulerConfig: the limits that every step and every request must keep."""

from __future__ import annotations

from dataclasses import dataclass

from ..kv.config import GroupConfig


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits per step (sequences, tokens, logit rows), and the KV groups of the engine, in its order."""

    max_batch_size: int
    max_step_tokens: int
    max_logit_rows: int
    groups: tuple[GroupConfig, ...]

    def __post_init__(self) -> None:
        # every running request must be able to run one token, or decodes could starve a prefill
        assert 1 <= self.max_batch_size <= min(self.max_step_tokens, self.max_logit_rows), self
        assert self.groups
