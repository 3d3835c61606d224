"""What `icc bench` is asked for; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..settings import setting
from ..values import integers


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure: every batch size with prompts and outputs of these lengths, `rounds` times."""

    prompt_tokens: int = setting(512, "Tokens of each prompt.")
    output_tokens: int = setting(128, "Tokens to generate after each.", needs="generate")
    batch_sizes: Sequence[int] = setting(
        (1,), "One or several.", names="--batch-size", read=integers, metavar="N,N", unset="1"
    )
    rounds: int = setting(3, "Times that each is measured; the median counts.")
    seed: int = setting(0, "Of the random prompts.")
