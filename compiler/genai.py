"""Reads genai_config.json, which onnxruntime's builder writes beside an ONNX model instead of config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GENAI_CONFIG = "genai_config.json"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")


def genai_config(folder: Path) -> dict[str, Any]:
    """The facts of config.json; {} if there is no genai_config.json, or nothing in it can be read."""
    model = _section(folder, "model")
    decoder = model.get("decoder")
    both = {**decoder, **model} if isinstance(decoder, dict) else model
    stated = {name: both.get(name) for name in (*_TOKENS, *_SIZES)}
    stated["model_type"], stated["max_position_embeddings"] = model.get("type"), model.get("context_length")
    return {name: value for name, value in stated.items() if value is not None}


def genai_generation(folder: Path) -> dict[str, Any]:
    """The facts of generation_config.json."""
    search = _section(folder, "search")
    return {name: search[name] for name in _SAMPLING if search.get(name) is not None}


def _section(folder: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / GENAI_CONFIG).read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
