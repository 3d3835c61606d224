"""Turns calibration text into token sequences for the passes that measure activations."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_TEXT = Path(__file__).parent / "data" / "calib.txt"
FEW = 256  # tokens; with two, awq4 made a tiny model answer nonsense, with 48 it did not


@dataclass(frozen=True)
class Calibration:
    """Token sequences of one length, and a warning to show if they are not what the user may expect, else ""."""

    sequences: list[list[int]]
    warning: str = ""


def load_calibration(
    path: Path | None,
    tokenizer_file: Path | None,
    vocab_size: int,
    num_sequences: int = 32,
    sequence_length: int = 512,
    seed: int = 0,
) -> Calibration:
    """Windows of the text in `path` (default: the bundled one), spread evenly; random tokens without a tokenizer.

    A text with fewer tokens than asked for gives fewer windows; a text that does not fill a single window is refused.
    """
    if path is not None:
        check_text(path, tokenizer_file is not None)
    if tokenizer_file is None:
        source = random.Random(seed)
        ids = [[source.randrange(vocab_size) for _ in range(sequence_length)] for _ in range(num_sequences)]
        return Calibration(ids, "the model has no tokenizer.json: calibrating on random token ids")
    text = read_text(path or DEFAULT_TEXT)
    tokens = [i for i in tokenize(text, tokenizer_file) if i < vocab_size]
    if len(tokens) < sequence_length:
        raise UsageError(
            f"calibration text {path or DEFAULT_TEXT} is too short: {len(tokens)} tokens, {sequence_length} are needed",
            "give a longer --calib file",
        )
    count = min(num_sequences, len(tokens) // sequence_length)
    stride = (len(tokens) - sequence_length) / max(1, count - 1)
    starts = [int(i * stride) for i in range(count)]
    read = count * sequence_length
    warning = (
        f"calibrating on {read} tokens only: what they do not show is lost; give a longer text" if read < FEW else ""
    )
    return Calibration([tokens[start : start + sequence_length] for start in starts], warning)


def check_text(path: Path, has_tokenizer: bool) -> None:
    """Raise UsageError for a text to calibrate or measure on that cannot be used, as far as can be told before it is
    tokenized.

    has_tokenizer: whether the model has one."""
    if not has_tokenizer:
        raise UsageError(
            f"text {path} cannot be used: the model has no tokenizer.json",
            "without --calib, calibration uses random token ids",
        )
    if not read_text(path).strip():
        raise UsageError(f"text {path} is empty")


def read_text(path: Path) -> str:
    """The file's text; raises UsageError in one line."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise UsageError(f"text {path}: no such file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"text {path} is not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise UsageError(f"text {path} cannot be read: {error.strerror}") from error


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a checkpoint. CheckpointError if the file is not a tokenizer."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file} is not a tokenizer: {error}", "download the checkpoint again") from error


def tokenize(text: str, tokenizer_file: Path) -> list[int]:
    """Token ids of a text, without special tokens."""
    tokenizer = read_tokenizer(tokenizer_file)
    tokenizer.no_truncation()  # turn off settings for training batches that a checkpoint may store
    tokenizer.no_padding()
    return tokenizer.encode(text, add_special_tokens=False).ids
