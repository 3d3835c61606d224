"""Reads how a checkpoint scores text pairs from the files that sentence-transformers' CrossEncoder wrote beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...errors import CheckpointError, UnsupportedModel
from .pooling import max_tokens, read_json, read_prompts


@dataclass(frozen=True)
class Words:
    """The tokens whose logits after a text make its score: logit(yes) - logit(no), or logit(yes) if `no` is None."""

    yes: int
    no: int | None


@dataclass(frozen=True)
class Scoring:
    """How the score of a pair of texts is computed.

    function: turns the model's number into the score. max_tokens: tokens of the longest pair that the model is meant
    for, 0 if not stated. words: the tokens whose logits give the number; None if the model's output is the number.
    prompt: the system message to a model that answers with these words.
    """

    function: Literal["sigmoid", "identity"] = "sigmoid"
    max_tokens: int = 0
    words: Words | None = None
    prompt: str = ""


def read_scoring(model_dir: Path) -> Scoring:
    """How a checkpoint's scores are computed. UnsupportedModel for modules, prompts or functions that icc lacks.

    Versions 6, 4 and 3 of sentence-transformers store the function's name in three places; the newest one counts.
    """
    words, others = read_words(model_dir), [name for name, _ in _modules(model_dir)[1:] if name != _BY_WORDS]
    if others:
        listing = model_dir / "modules.json"
        raise UnsupportedModel(f"{listing} has {', '.join(others)} behind the model, which --task rerank does not run")
    prompts, default = read_prompts(model_dir)
    if prompts.get(default) and words is None:
        raise UnsupportedModel(f"{model_dir} puts the prompt {default!r} before pairs, which --task rerank does not do")
    newer, config = (
        read_json(model_dir / name, dict) if (model_dir / name).is_file() else {}
        for name in ("config_sentence_transformers.json", "config.json")
    )
    stated = newer.get("activation_fn") or (config.get("sentence_transformers") or {}).get("activation_fn")
    stated = stated or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    name = str(stated).rsplit(".", 1)[-1].lower()
    if name not in ("sigmoid", "identity"):
        raise UnsupportedModel(
            f"{model_dir} has the activation function {stated} for scores", "icc has Sigmoid, Identity"
        )
    return Scoring(name, max_tokens(model_dir, model_dir), words, prompts.get(default, ""))  # type: ignore[arg-type]


def read_words(model_dir: Path) -> Words | None:
    """The words whose logits give a score; None if modules.json has no such module. CheckpointError if it has one that
    names no tokens."""
    folder = next((folder for name, folder in _modules(model_dir) if name == _BY_WORDS), None)
    if folder is None:
        return None
    path = model_dir / folder / "config.json"
    config = read_json(path, dict)
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    if type(yes) is not int or not (no is None or type(no) is int):
        raise CheckpointError(f"{path} has no true_token_id and false_token_id that are tokens")
    return Words(yes, no)


_BY_WORDS = "LogitScore"


def _modules(model_dir: Path) -> list[tuple[str, str]]:
    """The class and the folder of each module that sentence-transformers runs."""
    listing = model_dir / "modules.json"
    modules = read_json(listing, list) if listing.is_file() else []
    found = [module for module in modules if isinstance(module, dict)]
    return [(str(one.get("type", "")).rsplit(".", 1)[-1], str(one.get("path", ""))) for one in found]
