"""The sequence lengths that a model can be compiled for, from its configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ...errors import SequenceLengthError

DEFAULT_MAX_SEQ_LEN = 4096
_POSITION_LIMITS = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_seq_len",
    "max_sequence_length",
    "n_ctx",
)


def sequence_length(config: Any, wanted: int | None, unused: int = 0, endless: bool = False, meant: int = 0) -> int:
    """The length in tokens of the longest sequence: `wanted`; None: a default, at most the model's number of positions.

    config: transformers' configuration of the text model. unused: the number of its positions that no token has.
    endless: attention never sees larger distances than the model knows, so that rotary positions may exceed its limit.
    meant: the number of tokens that the model is meant for, which lowers the default; 0 if unknown. SequenceLengthError
    if `wanted` exceeds the model's positions.
    """
    limit = position_limit(config)
    limit = limit - unused if limit is not None else None
    if wanted is not None and limit is not None and wanted > limit and not (endless and _rotates(config)):
        raise SequenceLengthError(
            f"--max-seq-len {wanted} is above the {limit} positions of the model",
            f"give at most {limit}",
        )
    usual = min(meant or DEFAULT_MAX_SEQ_LEN, DEFAULT_MAX_SEQ_LEN)
    return wanted or min(usual, limit or usual)


def check_length(config: dict[str, Any], wanted: int | None, endless: bool = False) -> None:
    """Raise SequenceLengthError if the unchanged config.json says that `wanted` tokens are too many; None is never too
    many."""
    text = config.get("text_config")
    sequence_length(SimpleNamespace(**(text if isinstance(text, dict) else config)), wanted, endless=endless)


def _rotates(config: Any) -> bool:
    """Whether positions are encoded by angles (or slopes), which have no limit, and not by rows of a table."""
    return any(name.startswith(("rope", "rotary", "alibi")) and value for name, value in vars(config).items())


def position_limit(config: Any) -> int | None:
    """The number of the model's positions, under any of the names that configurations use; None if it does not say."""
    for name in _POSITION_LIMITS:
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return None
