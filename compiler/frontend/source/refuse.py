"""What config.json alone tells icc not to compile: encoders, models of unknown types, weights that are quantized."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ...errors import UnsupportedModel
from .families import families
from .packing import Packing, packing_of

_DECODERS = "icc compiles causal decoders; --task embed makes embeddings with one of those"
_NEWER = "a newer transformers may know it: pip install -U transformers"
_HEADLESS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForRewardModel")


def check_config(path: Path, config: dict[str, Any]) -> Packing | None:
    """How the weights of the checkpoint in `path` are packed, if they are.

    UnsupportedModel where its config.json says that icc cannot compile it.

    What it does not say (operations, sizes that do not go together) is refused when the model is built and traced.
    """
    packing = packing_of(config, path)
    _check_type(path, config)
    return packing


def check_head(path: Path, config: dict[str, Any]) -> None:
    """UnsupportedModel for a checkpoint that has no LM head and so cannot generate, if its config.json says so."""
    names = [str(name) for name in config.get("architectures") or []]
    if names and names[0].endswith(_HEADLESS) and config.get("tie_word_embeddings") is False:
        raise UnsupportedModel(
            f"{path} has the architecture {names[0]}, which has no LM head and generates no text",
            "for embeddings: --task embed",
        )


def _check_type(path: Path, config: dict[str, Any]) -> None:
    kind, tables = config["model_type"], families()
    if tables is None or (kind not in tables.known and "transformers" in sys.modules):
        return  # it knows more types than its tables say, those that were registered: the frontend asks it
    if kind not in tables.known:
        own_code = bool(config.get("auto_map"))
        raise UnsupportedModel(
            f"{path / 'config.json'}: transformers has no model type {kind!r}",
            "the checkpoint brings code of its own, which icc never runs" if own_code else _NEWER,
        )
    if config.get("is_encoder_decoder") or (kind in tables.seq2seq and config.get("is_encoder_decoder") is not False):
        raise UnsupportedModel(f"model type {kind!r} is an encoder-decoder, not a causal language model", _DECODERS)
    decodes = bool(config.get("is_decoder") or config.get("causal"))
    if kind in tables.masked and not (kind in tables.causal and decodes):
        raise UnsupportedModel(
            f"model type {kind!r} is a bidirectional encoder, not a causal language model: it generates no text",
            _DECODERS,
        )
    if kind not in tables.causal:
        raise UnsupportedModel(f"model type {kind!r} is not a causal language model in transformers", _DECODERS)
