"""`--gate`: how much worse than its model an engine may be, and the text to measure that on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .calibration import DEFAULT_TEXT, check_text, read_text, tokenize
from .errors import UsageError

WINDOW = 512  # tokens of a sequence, at most
CALIBRATED = 32  # windows of the bundled text that calibration reads by default
_HINT = "such as --gate ppl=2% (perplexity rises by at most 2 %) or --gate kl=0.01 (mean KL per token, in nats)"


@dataclass(frozen=True)
class Gate:
    """One condition. metric: "ppl", the relative increase of perplexity, or "kl", mean nats per token."""

    metric: str
    limit: float

    def __str__(self) -> str:
        return f"ppl={100 * self.limit:g}%" if self.metric == "ppl" else f"kl={self.limit:g}"


@dataclass(frozen=True)
class GatePlan:
    """What --gate asks for: conditions, and the windows of token ids to measure on. text: the source of the windows."""

    gates: tuple[Gate, ...]
    sequences: Sequence[Sequence[int]]
    text: str


def parse_gates(texts: Sequence[str]) -> tuple[Gate, ...]:
    """The conditions of `--gate`; each text has one or more, separated by commas. UsageError for one that cannot be
    read."""
    return tuple(_parse(part.strip()) for text in texts for part in text.split(","))


def _parse(text: str) -> Gate:
    metric, _, value = text.partition("=")
    percent = metric == "ppl" and value.endswith("%")
    try:
        limit = float(value.removesuffix("%") if percent else value) / (100 if percent else 1)
    except ValueError:
        limit = -1.0
    if metric not in ("ppl", "kl") or not 0 <= limit < float("inf"):
        raise UsageError(f"--gate {text!r} is not a condition", _HINT)
    if metric == "ppl" and limit >= 1 and not percent:
        raise UsageError(
            f"--gate {text!r} would let perplexity rise by {100 * limit:g} %",
            f"for {value} %: --gate ppl={value}%; if it is meant: --gate ppl={100 * limit:g}%",
        )
    return Gate(metric, limit)


def gate_sequences(
    path: Path | None, tokenizer: Path | None, vocab_size: int, bos: int | None, max_seq_len: int
) -> list[list[int]]:
    """The token ids to measure on, in windows that do not overlap: the whole text of `path`, or, if it is None, the
    parts of the bundled text between those that calibration reads. bos: the token that each window begins with; None
    for none. UsageError for a text that cannot be used, or if there is no tokenizer."""
    if tokenizer is None:
        raise UsageError("--gate reads a text, and the model has no tokenizer.json")
    if path is not None:
        check_text(path, True)
    tokens = [token for token in tokenize(read_text(path or DEFAULT_TEXT), tokenizer) if token < vocab_size]
    room = min(WINDOW, max_seq_len) - (bos is not None)
    starts = [*range(0, len(tokens), room)]
    if path is None:
        stride = (len(tokens) - room) / (CALIBRATED - 1)
        starts = [int((i + 0.5) * stride) for i in range(CALIBRATED // 8, CALIBRATED - 1, CALIBRATED // 8)]
    found = [([] if bos is None else [bos]) + tokens[start : start + room] for start in starts]
    found = [window for window in found if len(window) >= 2]
    if not found:
        raise UsageError(f"--gate-text {path} has no token to score", "give a longer text")
    return found
