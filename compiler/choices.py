"""The choices of a compile's options, each with its meaning."""

from __future__ import annotations

from ..runtime.format.manifest import Pooling

TASKS = {"generate": "text", "embed": "one vector per text", "rerank": "one score per pair of texts"}
POOLINGS: dict[Pooling, str] = {
    "last": "the hidden state of the last token",
    "mean": "the mean over all tokens",
    "cls": "the hidden state of the first token",
    "max": "the maximum of each element",
    "weightedmean": "the mean with weights 1, 2, 3 .. by position",
    "mean_sqrt_len": "the sum over the root of the number of tokens",
}
STATE_DTYPES = {
    "f32": "what the model does",
    "bf16": "half the memory; matrices and vectors rounded to 8 bits of precision",
}
