"""canaries.json: a few prompts and the model's logits for them, computed by the compiler's own interpreter in
float32."""

from __future__ import annotations

import msgspec

CANARIES_FILE = "canaries.json"


class Canary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt's token ids, and the logits of some ids at some positions: `logits[i]` are those of `ids[i]` at
    `positions[i]`.

    For an engine that embeds, `ids` are dimensions of the hidden states.
    """

    tokens: list[int]
    positions: list[int]
    ids: list[list[int]]
    logits: list[list[float]]


class Canaries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The prompts, and the largest error that is allowed. The error of a position is the RMS of the difference, divided
    by the standard deviation of the answers; the error of a prompt is the median over its positions. Kernels round
    activations to 8 or 16 bits, so digits always differ; and if rounding sends a token to another expert, its whole
    answer differs."""

    allowed: float
    prompts: list[Canary]
