"""To which sizes the steps of a launch plan are padded, so that few CUDA graphs serve all of them."""

from __future__ import annotations

from typing import NamedTuple

from ..format.batch import BatchLimits
from ..format.plan import Phase

# Tokens of a step whose launches take longer to give than to run, so that a graph pays. Larger ones run as they are.
GRAPHED = 512


class StepSize(NamedTuple):
    """Tokens, sequences and logit rows of a step."""

    tokens: int
    seqs: int
    rows: int


def padded_size(phase: Phase, size: StepSize, limits: BatchLimits) -> StepSize:
    """A decode step is as large as its phase; of mixed steps there are four token counts per doubling, and sequences
    are powers of two, as are logit rows unless guesses are verified. Never more rows than tokens: buffers hold no more.
    None where there are none: then nothing is done for them.
    """
    if phase.decode:
        most = phase.max_tokens
        return StepSize(most, most, most)
    if size.tokens > GRAPHED:
        return size
    tokens = min(_quarter(size.tokens), phase.max_tokens)
    spare = size.seqs + (tokens > size.tokens)  # one sequence has all the added tokens
    seqs = min(1 << (spare - 1).bit_length(), limits.seqs)
    rows = 0 if not size.rows else seqs if size.rows <= seqs else _quarter(size.rows)
    return StepSize(tokens, seqs, min(rows, tokens, limits.logit_rows))


def _quarter(count: int) -> int:
    """The next multiple of a quarter of the power of two below it; of 4 at least."""
    step = max(1 << (count - 1).bit_length() >> 3, 4)
    return -(-count // step) * step
