"""For how many tokens a model can be compiled, by what its configuration says."""

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
    """How many tokens the longest sequence may have: `wanted`, or if that is None a default that is not more than the
    model has positions for.

    config: transformers' configuration of the text model. unused: how many of its positions no token ever has. endless:
    attention never sees larger distances than the model knows, so that rotary positions may go on. meant: the number of
    tokens that the model is meant for, in place of the default; 0 if nothing says it. SequenceLengthError where
    `wanted` is more than the model has.
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
    """SequenceLengthError where config.json, as it stands, says that `wanted` tokens are too many; None never are."""
    text = config.get("text_config")
    sequence_length(SimpleNamespace(**(text if isinstance(text, dict) else config)), wanted, endless=endless)


def _rotates(config: Any) -> bool:
    """Whether positions are angles (or slopes), of which there are always more, and not rows of a table."""
    return any(name.startswith(("rope", "rotary", "alibi")) and value for name, value in vars(config).items())


def position_limit(config: Any) -> int | None:
    """How many positions the model has, by any of the names that configurations use; None if it does not say."""
    for name in _POSITION_LIMITS:
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return None
