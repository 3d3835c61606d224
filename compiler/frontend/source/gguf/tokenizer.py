"""What a GGUF file has as metadata, as files of a checkpoint directory: tokenizer, chat template, special tokens."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import CheckpointError, UnsupportedModel
from .config import architecture_of
from .container import Container
from .splits import completed_splits

# what llama.cpp takes for the end of an answer, beside eos_token_id: keys of ids, and tokens by their text
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>",
    "<|end_of_text|>", "<end_of_utterance>",
)  # fmt: skip


def write_files(container: Container, config: Any, folder: Path) -> None:
    """config.json and generation_config.json, and where the file has a vocabulary tokenizer.json, tokenizer_config.json
    and chat_template.jinja, as transformers writes them."""
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    facts = {
        f"{k}_token_id": v for k in ("bos", "eos", "pad") if (v := getattr(config, f"{k}_token_id", None)) is not None
    }
    tokens = container.get("tokenizer.ggml.tokens", list)
    if tokens and container.get("tokenizer.ggml.model", str) not in (None, "no_vocab", "none"):
        _write_tokenizer(container, folder)
        facts["eos_token_id"] = _ends(container, tokens)
    (folder / "generation_config.json").write_text(json.dumps(facts))


def _ends(container: Container, tokens: list[str]) -> list[int]:
    """Ids of the tokens that end an answer, the file's own first."""
    named = [container.get(f"tokenizer.ggml.{key}", int) for key in _END_KEYS]
    kinds = container.get("tokenizer.ggml.token_type", np.ndarray)
    control = set() if kinds is None else set(np.flatnonzero((kinds == 3) | (kinds == 4)).tolist())
    found = [number for number, token in enumerate(tokens) if token in _END_TEXTS and number in control]
    return list(dict.fromkeys(i for i in [*named, *found] if i is not None and 0 <= i < len(tokens)))


def _write_tokenizer(container: Container, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    facts, options = _tokenizer_facts(container)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        made, _ = convert_gguf_tokenizer(architecture_of(container), facts)
        made = completed_splits(made, facts)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **options)
        tokenizer.save_pretrained(folder)
    except UnsupportedModel:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(f"{container.path}: the metadata make no tokenizer: {reason}") from error


def _tokenizer_facts(container: Container) -> tuple[dict[str, Any], dict[str, Any]]:
    """What transformers makes a tokenizer of, and its options, as `get_gguf_tokenizer` reads them."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING

    metadata = container.metadata

    def read(group: str) -> dict[str, Any]:
        found = {name: metadata.get(f"tokenizer.{key}") for key, name in GGUF_TOKENIZER_MAPPING[group].items()}
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found.items() if v is not None}

    facts, options = read("tokenizer"), read("tokenizer_config")
    tokens = facts["tokens"]
    if facts.get("tokenizer_type") == "llama":
        options.setdefault("add_bos_token", True)  # llama.cpp does so where the file does not say
    for token, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = container.get(f"tokenizer.ggml.{key}_token_id", int)
        if number is not None and not 0 <= number < len(tokens):
            raise CheckpointError(f"{container.path}: there is no token {number}, the {key} token of {len(tokens)}")
        options[f"{token}_token"] = None if number is None else tokens[number]
    return facts, options
