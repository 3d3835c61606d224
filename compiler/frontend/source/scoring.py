"""How a checkpoint's scores of text pairs are made: what sentence-transformers' CrossEncoder wrote beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...errors import UnsupportedModel
from .pooling import max_tokens, read_json, read_prompts


@dataclass(frozen=True)
class Scoring:
    """function: what makes a score of a number. max_tokens: the longest pair that the model is meant for, 0 if nothing
    says it."""

    function: Literal["sigmoid", "identity"] = "sigmoid"
    max_tokens: int = 0


def read_scoring(model_dir: Path) -> Scoring:
    """UnsupportedModel for modules, prompts or functions that icc lacks.

    Versions 6, 4 and 3 have the function's name in three places, of which the newest counts.
    """
    listing = model_dir / "modules.json"
    modules = read_json(listing, list) if listing.is_file() else []
    names = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules if isinstance(module, dict)]
    if more := ", ".join(names[1:]):
        raise UnsupportedModel(f"{listing} has {more} behind the model, which --task rerank does not run")
    prompts, default = read_prompts(model_dir)
    if prompts.get(default):
        raise UnsupportedModel(f"{model_dir} puts the prompt {default!r} before pairs, which --task rerank does not do")
    newer, config = (
        read_json(model_dir / name, dict) if (model_dir / name).is_file() else {}
        for name in ("config_sentence_transformers.json", "config.json")
    )
    stated = newer.get("activation_fn") or (config.get("sentence_transformers") or {}).get("activation_fn")
    stated = stated or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    name = str(stated).rsplit(".", 1)[-1].lower()
    if name not in ("sigmoid", "identity"):
        raise UnsupportedModel(f"{model_dir} has the activation function {stated} for scores")
    return Scoring(name, max_tokens(model_dir, model_dir))  # type: ignore[arg-type]
