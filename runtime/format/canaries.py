"""canaries.json: a few prompts, and what the model answers to them by the compiler's own arithmetic in float32."""

from __future__ import annotations

import msgspec

CANARIES_FILE = "canaries.json"


class Canary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt's token ids, and for some of its positions the logits of some ids: those of `ids[i]` are `logits[i]`.

    For an engine that embeds, `ids` are dimensions of the hidden states.
    """

    tokens: list[int]
    positions: list[int]
    ids: list[list[int]]
    logits: list[list[float]]


class Canaries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The prompts, and how far kernels may be off: of each position the root mean square of the difference over that of
    the answers about their mean, and of these the median of a prompt. Kernels round activations to 8 or 16 bits, so
    they never agree in every digit; and where that sends a token to another expert, its whole answer differs."""

    allowed: float
    prompts: list[Canary]
