"""Refuses what config.json alone shows that icc cannot compile: encoders, unknown model types, unknown
quantizations."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ...errors import UnsupportedModel
from .families import families
from .packages import is_offered
from .packing import packing_of
from .packings import Packing
from .scoring import read_words

_TASKS = "icc compiles causal decoders, and encoders of text with --task embed or --task rerank"
_NEWER = "a newer transformers may know it: pip install -U transformers"
_HEADLESS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForRewardModel")


def check_config(path: Path, config: dict[str, Any], task: str = "generate") -> Packing | None:
    """How the weights of the checkpoint in `path` are packed; None if they are not.

    config: its config.json. task: "generate", "embed" or "rerank". UnsupportedModel if config.json shows that icc
    cannot compile the checkpoint for the task. Other problems (operations, inconsistent sizes) are refused when the
    model is built and traced.
    """
    packing = packing_of(config, path)
    _check_type(path, config, task)
    return packing


def check_layers(path: Path, config: Any) -> None:
    """Raise UnsupportedModel for a configuration without layers: the checkpoint's layers would be dropped silently."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise UnsupportedModel(f"{path / 'config.json'}: {layers} layers: a model has one at least")


def check_head(path: Path, config: dict[str, Any]) -> None:
    """Raise UnsupportedModel if config.json shows that the checkpoint has no LM head and cannot generate text."""
    names = [str(name) for name in config.get("architectures") or []]
    headless = names and names[0].endswith(_HEADLESS) and "LMHead" not in names[0]  # GPT2LMHeadModel has one
    if headless and config.get("tie_word_embeddings") is False:
        raise UnsupportedModel(
            f"{path} has the architecture {names[0]}, which has no LM head and generates no text",
            "for embeddings: --task embed",
        )


def check_scores(path: Path, config: dict[str, Any]) -> None:
    """Raise UnsupportedModel for a checkpoint without a classification head, or with more than two labels."""
    names = [str(name) for name in config.get("architectures") or []]
    if names and not names[0].endswith("ForSequenceClassification"):
        if read_words(path) is not None:
            return
        raise UnsupportedModel(
            f"{path} has the architecture {names[0]}, which gives a pair of texts no score",
            "--task rerank is for sequence classification with one or two labels; for embeddings: --task embed",
        )
    labels = config.get("id2label") or config.get("num_labels") or 1
    labels = len(labels) if isinstance(labels, dict) else labels
    if labels not in (1, 2):
        raise UnsupportedModel(f"{path} has {labels} labels", "--task rerank is for one or two labels")


def _check_type(path: Path, config: dict[str, Any], task: str) -> None:
    kind, tables = config["model_type"], families()
    if tables is None or (kind not in tables.known and ("transformers" in sys.modules or is_offered(kind))):
        return  # types may be registered that the tables lack: the frontend asks transformers itself
    if kind not in tables.known:
        own_code = bool(config.get("auto_map"))
        raise UnsupportedModel(
            f"{path / 'config.json'}: transformers has no model type {kind!r}",
            "the checkpoint brings code of its own, which icc never runs" if own_code else _NEWER,
        )
    if task == "rerank" and kind in tables.causal and read_words(path) is not None:
        return
    if task == "embed" and kind in tables.reading:
        return
    part = isinstance(config.get("text_config"), dict)  # a multimodal model, whose decoder is compiled
    pair = kind in tables.seq2seq and config.get("is_encoder_decoder") is not False and not part
    if config.get("is_encoder_decoder") or pair:
        raise UnsupportedModel(f"model type {kind!r} is an encoder-decoder, not a causal language model", _TASKS)
    if task == "rerank" and kind not in tables.sorting:
        raise UnsupportedModel(f"model type {kind!r} has no head in transformers that scores a text", _TASKS)
    if task != "generate" and (kind in tables.masked or kind in tables.sorting):
        return
    if task == "embed" and kind in tables.plain:
        return
    decodes = bool(config.get("is_decoder") or config.get("causal"))
    if kind in tables.masked and not (kind in tables.causal and decodes):
        raise UnsupportedModel(
            f"model type {kind!r} is a bidirectional encoder, not a causal language model: it generates no text",
            "--task embed for embeddings, --task rerank for scores",
        )
    sees = task == "generate" and (kind in tables.seeing or (part and kind in tables.seq2seq))
    if kind not in tables.causal and not sees:
        raise UnsupportedModel(f"model type {kind!r} is not a causal language model in transformers", _TASKS)
