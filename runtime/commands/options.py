"""The options of `icc bench`; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..settings import setting
from ..values import integers, numbers

MODES = ("static", "dynamic", "continuous")


def modes(text: str) -> tuple[str, ...]:
    """The modes named in a text such as static,continuous, in the order of MODES. ValueError for an unknown mode."""
    found = {part.strip() for part in text.split(",")}
    if other := sorted(found - set(MODES)):
        raise ValueError(f"{other[0]!r} is not {', '.join(MODES[:-1])} or {MODES[-1]}")
    return tuple(mode for mode in MODES if mode in found)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure: every batch size (none: 1) with prompts and outputs of these lengths, `rounds` times."""

    prompt_tokens: int = setting(512, "Tokens of each prompt.")
    output_tokens: int = setting(128, "Tokens to generate after each.", needs="generate")
    batch_sizes: Sequence[int] = setting(
        (), "One or several.", names="--batch-size", read=integers, metavar="N,N", unset="1; all, of --batching"
    )
    rounds: int = setting(3, "Number of measurements of each; the median counts.")
    seed: int = setting(0, "Of the random prompts.")


@dataclass(frozen=True, slots=True)
class BatchingOptions:
    """Batching modes to compare on `requests` requests that come at each `rate` (requests per second) in turn; no rate:
    40, 70 and 100 % of the throughput when all come at once.

    window_s: how long the first request of a dynamic batch waits for others.
    """

    batching: Sequence[str] = setting(
        (), "Compare static, dynamic and continuous batching, with lengths from 1 to the given ones.",
        needs="generate", read=modes, metavar="MODE,MODE", unset="no"
    )  # fmt: skip
    requests: int = setting(64, "With --batching: requests of each run.", needs="generate")
    rate: Sequence[float] = setting(
        (), "With --batching: requests per second, a run for each.", needs="generate", read=numbers, metavar="R,R",
        unset="40, 70 and 100 % of the most"
    )  # fmt: skip
    window_s: float = setting(
        0.1, "With --batching: how long a dynamic batch waits.", needs="generate", names="--window", metavar="S"
    )
    html: Path | None = setting(None, "With --batching: write a report here.", needs="generate", metavar="FILE")
