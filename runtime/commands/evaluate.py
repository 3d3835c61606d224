"""`eval`: how well a model predicts a text: perplexity and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from ..errors import RequestError, UsageError
from ..format.manifest import Manifest
from ..tokenizer import Tokenizer

_WINDOW = 1024  # default tokens of a window


@dataclass(frozen=True, slots=True)
class Evaluation:
    """nll_per_token in nats; bits_per_byte over the UTF-8 bytes of the scored text."""

    tokens: int
    bytes: int
    nll_per_token: float
    perplexity: float
    bits_per_byte: float

    def as_json(self) -> dict[str, object]:
        """The fields by name."""
        return asdict(self)


class Scorer(Protocol):
    """A model to evaluate: an LLM, or anything else that gives logits."""

    manifest: Manifest
    tokenizer: Tokenizer | None

    def iter_logits(self, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Logits float32 [rows, vocab], a chunk of rows at a time."""
        ...


def evaluate_text(
    llm: Scorer,
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Evaluation:
    """Score a text in sliding windows, each token once.

    A window holds `window` tokens (default: 1024, or the engine's limit), starts with the bos token if the model has
    one, and moves by `stride` tokens (default: half a window). In all windows but the first, only the last `stride`
    tokens are scored, so that each has context. `progress` is called with (tokens done, tokens in all). RequestError if
    the engine has no tokenizer, UsageError if the text has nothing to score, or the window does not fit the engine or
    the stride.
    """
    if llm.tokenizer is None:
        raise RequestError("the engine has no tokenizer, so it cannot read a text")
    token_ids = llm.tokenizer.encode(text, add_special_tokens=False)
    bos = llm.manifest.model.bos_token_id
    scored_bytes = len(text.encode())
    if bos is None:  # the first token has no prediction
        scored_bytes -= len(llm.tokenizer.decode(token_ids[:1]).encode())
    limit = llm.manifest.limits.max_seq_len
    window = min(_WINDOW, limit) if window is None else window
    room = window - (bos is not None)
    stride = max(room // 2, 1) if stride is None else stride
    if not 2 <= window <= limit or not 1 <= stride < window:  # every scored token needs one before it
        raise UsageError(f"window {window} and stride {stride}: need 2 <= window <= {limit}, 1 <= stride < window")
    if len(token_ids) < 1 + (bos is None):
        raise UsageError("the text has no token to score")
    total, scored = 0.0, 0
    for begin, first, end in windows(len(token_ids), room, stride):
        prefix = [] if bos is None else [bos]
        inputs = prefix + token_ids[begin:end]
        nll = _nll(llm, inputs)  # of inputs[1:]
        fresh = nll[max(first - begin + len(prefix) - 1, 0) :]
        total += float(fresh.sum())
        scored += len(fresh)
        if progress is not None:
            progress(end, len(token_ids))
    return Evaluation(
        tokens=scored,
        bytes=scored_bytes,
        nll_per_token=total / scored,
        perplexity=math.exp(min(total / scored, 700.0)),
        bits_per_byte=total / math.log(2) / max(scored_bytes, 1),
    )


def windows(count: int, room: int, stride: int) -> list[tuple[int, int, int]]:
    """(begin, first scored, end) of each window over `count` tokens; each token is scored in exactly one window. room:
    tokens of a window."""
    result = [(0, 0, min(room, count))]
    while result[-1][2] < count:
        first = result[-1][2]
        end = min(first + stride, count)
        result.append((max(end - room, 0), first, end))
    return result


def _nll(llm: Scorer, inputs: list[int]) -> np.ndarray:
    """Negative log-likelihood in nats of inputs[1:], float64."""
    losses: list[np.ndarray] = []
    row = 0
    for chunk in llm.iter_logits(inputs):
        targets = np.asarray(inputs[row + 1 : row + 1 + len(chunk)], dtype=np.int64)
        row += len(chunk)
        logits = chunk[: len(targets)]  # the very last row predicts a token beyond the text
        largest = logits.max(axis=1, keepdims=True)
        total = np.exp(logits - largest).sum(axis=1, dtype=np.float64)
        losses.append(np.log(total) + largest[:, 0] - logits[np.arange(len(targets)), targets])
    return np.concatenate(losses)
