"""Writes a GGUF file's metadata as files of a checkpoint directory: tokenizer, chat template, special tokens."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np

from .....runtime.format.gguf import GgufContainer
from .....runtime.format.manifest import TEMPLATE_DIR
from ....errors import CheckpointError, IccError, UnsupportedModel
from .config import architecture, architecture_of, special_token
from .encoders import around, wordpiece, write_pooling
from .splits import completed_splits

# llama.cpp's marks of the end of an answer, beside eos_token_id: keys of ids, and texts of tokens
_END_KEYS = ("eos", "eot", "eom")
_END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>",
    "<|end_of_text|>", "<end_of_utterance>",
)  # fmt: skip

# metadata that a tokenizer needs, by the kind of vocabulary
_NEEDED = {"gpt2": ("merges", list), "llama": ("scores", np.ndarray), "t5": ("scores", np.ndarray)}
_KIND = "tokenizer.ggml.model is missing: download it again"
_NOTHING_ELSE = ("bert", "gemma4")
_WORD = re.compile(r"[\w-]+")


def write_files(container: GgufContainer, config: Any, folder: Path) -> None:
    """Write config.json and generation_config.json into `folder`, and tokenizer.json, tokenizer_config.json and
    chat_template.jinja if the file has a vocabulary, as transformers writes them.

    CheckpointError for damaged metadata; UnsupportedModel for a kind of vocabulary that icc does not read.
    """
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    facts = {
        f"{k}_token_id": v for k in ("bos", "eos", "pad") if (v := getattr(config, f"{k}_token_id", None)) is not None
    }
    tokens = container.get("tokenizer.ggml.tokens", list)
    kind = container.get("tokenizer.ggml.model", str)
    if tokens and kind is None:
        raise CheckpointError(f"{container.path} has {len(tokens)} tokens and does not say of what kind", _KIND)
    if tokens and kind not in ("no_vocab", "none"):
        _write_tokenizer(container, folder)
        _write_templates(container, folder / TEMPLATE_DIR)
        facts["eos_token_id"] = _ends(container, tokens)
    (folder / "generation_config.json").write_text(json.dumps(facts))
    write_pooling(container, folder)


def _write_templates(container: GgufContainer, folder: Path) -> None:
    """Write the further chat templates, "tokenizer.chat_template.NAME" for each name in a list."""
    for name in container.get("tokenizer.chat_templates", list) or ():
        text = container.get(f"tokenizer.chat_template.{name}", str)
        if text and _WORD.fullmatch(name):
            folder.mkdir(exist_ok=True)
            (folder / f"{name}.jinja").write_text(text)


def _ends(container: GgufContainer, tokens: list[str]) -> list[int]:
    """Ids of the tokens that end an answer, the file's own first."""
    named = [special_token(container, name) for name in _END_KEYS]
    kinds = container.get("tokenizer.ggml.token_type", np.ndarray)
    control = set() if kinds is None else set(np.flatnonzero((kinds == 3) | (kinds == 4)).tolist())
    found = [number for number, token in enumerate(tokens) if token in _END_TEXTS and number in control]
    return list(dict.fromkeys(i for i in [*named, *found] if i is not None and 0 <= i < len(tokens)))


def _write_tokenizer(container: GgufContainer, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    facts, options = _tokenizer_facts(container)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        if facts["tokenizer_type"] == "bert":
            made, names = wordpiece(container, facts)
            options |= names | dict.fromkeys(("bos_token", "eos_token"))
        else:
            made, _ = convert_gguf_tokenizer(architecture_of(container), facts)
            made = completed_splits(_without_others(made, len(facts["tokens"])), facts)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **options)
        if architecture(container).sees_all:  # this class does not add these tokens
            tokenizer.backend_tokenizer.post_processor = around(container, facts["tokens"], made)
        tokenizer.save_pretrained(folder)
    except IccError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(f"{container.path}: the metadata make no tokenizer: {reason}") from error


def _without_others(made: Any, count: int) -> Any:
    """The tokenizer without the tokens that transformers' classes add to the file's `count` tokens: the model has no
    rows for them."""
    from tokenizers import Tokenizer

    if made.get_vocab_size() <= count:
        return made
    whole = json.loads(made.to_str())
    whole["added_tokens"] = [token for token in whole["added_tokens"] if token["id"] < count]
    return Tokenizer.from_str(json.dumps(whole))


def _tokenizer_facts(container: GgufContainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts from which transformers makes a tokenizer, and its options, as `get_gguf_tokenizer` reads them."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING

    metadata = container.metadata

    def read(group: str) -> dict[str, Any]:
        found = {name: metadata.get(f"tokenizer.{key}") for key, name in GGUF_TOKENIZER_MAPPING[group].items()}
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found.items() if v is not None}

    facts, options = read("tokenizer"), read("tokenizer_config")
    tokens = facts["tokens"]
    _check(container, facts)
    if facts.get("tokenizer_type") == "llama":
        options.setdefault("add_bos_token", True)  # llama.cpp's default
    for token, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = special_token(container, key)
        if number is not None and not 0 <= number < len(tokens):
            raise CheckpointError(f"{container.path}: there is no token {number}, the {key} token of {len(tokens)}")
        options[f"{token}_token"] = None if number is None else tokens[number]
    return facts, options


def _check(container: GgufContainer, facts: dict[str, Any]) -> None:
    """Check that the fields of a vocabulary exist, have the right type and cover every token."""
    kind, count = container.get("tokenizer.ggml.model", str), len(facts["tokens"])
    if kind not in (*_NEEDED, *_NOTHING_ELSE):
        raise UnsupportedModel(
            f"{container.path} has a vocabulary of the kind {kind!r} (tokenizer.ggml.model)",
            f"compile the checkpoint that it was made of; icc reads {', '.join(sorted((*_NEEDED, *_NOTHING_ELSE)))}",
        )
    fields = {"token_type": np.ndarray, **({_NEEDED[kind][0]: _NEEDED[kind][1]} if kind in _NEEDED else {})}
    for name, wanted in fields.items():
        found = container.get(f"tokenizer.ggml.{name}", wanted)
        if found is None and name != "token_type" and not (name == "scores" and "merges" in facts):
            raise CheckpointError(f"{container.path}: a vocabulary of the kind {kind!r} lacks tokenizer.ggml.{name}")
        if name != "merges" and found is not None and len(found) < count:
            raise CheckpointError(f"{container.path}: tokenizer.ggml.{name} has {len(found)} of {count} tokens")
    container.get("tokenizer.chat_template", str)
    for name in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        container.get(f"tokenizer.ggml.{name}", bool)
    table = container.tensors.get("token_embd.weight")
    if table is not None and table.shape[0] < count:
        raise CheckpointError(f"{container.path}: there are {count} tokens, and embeddings of {table.shape[0]}")
