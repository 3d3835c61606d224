"""StepTable: durations of an engine's steps on a machine, measured at some sizes and interpolated for others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...batch.scheduled import ScheduledBatch
from ...errors import UsageError
from ...kv.config import GroupConfig
from ...kv.policy import CachePolicy, KeepAll, Latest, Window, WithinStep
from ...scheduler.config import SchedulerConfig

_POLICIES: dict[str, type[CachePolicy]] = {"all": KeepAll, "window": Window, "state": Latest, "step": WithinStep}


class TableGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A KV group: `num_blocks` blocks of `block_size` tokens. keeps: "all", a "window" of `size` tokens, a "state" with
    `size` checkpoints, or a "step": nothing after it."""

    num_blocks: int
    block_size: int
    keeps: str = "all"
    size: int = 0

    @classmethod
    def of(cls, group: GroupConfig) -> TableGroup:
        """The entry of an engine's group. UsageError for a policy whose steps depend on computed values."""
        for name, kind in _POLICIES.items():
            if type(group.policy) is kind:
                size = getattr(group.policy, "size", getattr(group.policy, "checkpoints", 0))
                return cls(group.num_blocks, group.block_size, name, size)
        raise UsageError("--traffic: a cache that forgets cannot be simulated", "compile without --kv-policy")

    @property
    def config(self) -> GroupConfig:
        """The group for the scheduler. UsageError for an unknown value of `keeps`."""
        if self.keeps not in _POLICIES:
            raise UsageError(f"a KV group keeps {self.keeps!r}", f"give one of {', '.join(_POLICIES)}")
        kind = _POLICIES[self.keeps]
        sized = kind in (Window, Latest)
        return GroupConfig(self.num_blocks, self.block_size, policy=kind(self.size) if sized else kind())


class StepTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Durations of steps, in seconds. decode: (sequences, seconds) of decode steps with hardly any context; prompt:
    (tokens, seconds) of steps with the beginning of one prompt. Additional seconds: decode_context per sequence and
    token of its context; prompt_context per prompt token and token of context before its chunk; row per sequence that
    decodes beside a prompt; taken per token whose KV comes from another process, None if it cannot; given per token
    whose KV is published for another process. max_batch_size, max_step_tokens, max_logit_rows, groups: the limits of
    one replica's steps, and its cache.
    """

    decode: list[tuple[int, float]]
    prompt: list[tuple[int, float]]
    decode_context: float
    prompt_context: float
    row: float
    taken: float | None
    max_batch_size: int
    max_step_tokens: int
    max_logit_rows: int
    groups: list[TableGroup]
    given: float | None = None
    max_seq_len: int = 0  # tokens of a sequence; 0 if only the cache limits them, as in files of older versions

    @classmethod
    def read(cls, path: Path) -> StepTable:
        """Read the table from a file. UsageError if it is not a table."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise UsageError(f"--step-costs {path}: {error}", "write one with --write-step-costs") from error
        if not (found.decode and found.prompt and found.groups):
            raise UsageError(f"--step-costs {path} has no steps, or no KV groups", "write one with --write-step-costs")
        return found

    def write(self, path: Path) -> None:
        """Write the table to a file for `read`. UsageError if it cannot be written."""
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        except OSError as error:
            raise UsageError(f"--write-step-costs {path}: {error}", "give another file") from error

    @property
    def config(self) -> SchedulerConfig:
        """The scheduler's configuration for one replica."""
        groups = tuple(group.config for group in self.groups)
        return SchedulerConfig(self.max_batch_size, self.max_step_tokens, self.max_logit_rows, groups)

    def seconds(self, batch: ScheduledBatch) -> float:
        """The duration of a step, in seconds."""
        going, chunks = 0, 0
        context = work = 0
        for sequence in batch.sequences:
            if len(sequence.token_ids) == 1 and sequence.start >= sequence.prompt:
                going += 1
                context += sequence.start
            else:
                chunks += len(sequence.token_ids)
                work += len(sequence.token_ids) * sequence.start
        more = context * self.decode_context + work * self.prompt_context
        if not chunks:
            return _between(self.decode, going) + more
        return self.prompt_seconds(chunks + going) + going * self.row + more

    def prompt_seconds(self, tokens: int) -> float:
        """The duration, in seconds, of a step with the first `tokens` tokens of a prompt."""
        return _between(self.prompt, tokens)


def _between(points: Sequence[tuple[int, float]], size: int) -> float:
    """Seconds at `size`: linear interpolation between measured sizes, and extrapolation beyond them, bounded from
    below."""
    if len(points) == 1:
        return points[0][1]
    at = min(max(bisect_left(points, (size,)), 1), len(points) - 1)
    (low, below), (high, above) = points[at - 1], points[at]
    return max(below + (above - below) * (size - low) / (high - low), min(below, above) * 0.5)
