"""The sizes to which steps of a launch plan are padded, so that few CUDA graphs serve all steps."""

from __future__ import annotations

from typing import NamedTuple

from ..format.batch import BatchLimits
from ..format.plan import Phase

# Up to this many tokens, launching the kernels takes longer than running them, so that a graph pays. Larger steps are
# not padded.
GRAPHED = 512


class StepSize(NamedTuple):
    """The numbers of tokens, sequences and logit rows of a step."""

    tokens: int
    seqs: int
    rows: int


def padded_size(phase: Phase, size: StepSize, limits: BatchLimits) -> StepSize:
    """The padded size of a step. A decode step gets the size of its phase. A mixed step gets one of four token counts
    per doubling, and a power of two for sequences and, unless draft tokens are verified, for logit rows. There are
    never more rows than tokens, because buffers hold no more. A step without logit rows keeps 0.
    """
    if phase.decode:
        most = phase.max_tokens
        return StepSize(most, most, most)
    if size.tokens > GRAPHED:
        return size
    tokens = min(_quarter(size.tokens), phase.max_tokens)
    spare = size.seqs + (tokens > size.tokens)  # one more sequence holds the added tokens
    seqs = min(1 << (spare - 1).bit_length(), limits.seqs)
    rows = 0 if not size.rows else seqs if size.rows <= seqs else _quarter(size.rows)
    return StepSize(tokens, seqs, min(rows, tokens, limits.logit_rows))


def _quarter(count: int) -> int:
    """The next multiple of a quarter of the power of two below it; of 4 at least."""
    step = max(1 << (count - 1).bit_length() >> 3, 4)
    return -(-count // step) * step
