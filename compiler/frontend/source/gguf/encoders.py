"""Reads GGUF files of encoders: a WordPiece vocabulary, and the pooling of hidden states.

llama.cpp writes word-initial pieces with a leading space mark, and other pieces without BERT's leading "##"
(`conversion/bert.py`); `src/llama-vocab.cpp` reads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .....runtime.format.gguf import GgufContainer

_SPACE, _CONTROL = "\u2581", 3
_POOLED = {1: "mean", 2: "cls", 3: "lasttoken"}  # llama.cpp's `llama_pooling_type`
# llama.cpp's default ids
_DEFAULTS = {"unknown": 100, "cls": 101, "seperator": 102, "padding": 0, "mask": 103}
_NAMES = {"unknown": "unk_token", "cls": "cls_token", "seperator": "sep_token", "padding": "pad_token"}


def wordpiece(container: GgufContainer, facts: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """A WordPiece tokenizer of the `tokenizers` library, and its special tokens by option name."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kinds = facts.get("token_type") or [1] * len(facts["tokens"])
    own = [_piece(token, kind) for token, kind in zip(facts["tokens"], kinds, strict=True)]
    vocabulary = {token: number for number, token in reversed(list(enumerate(own)))}
    special = {name: _special(container, name, own) for name in _DEFAULTS}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token=special["unknown"], max_input_chars_per_word=100))
    lower = container.get("tokenizer.ggml.normalizer.lowercase", bool, True)
    accents = container.get("tokenizer.ggml.normalizer.strip_accents", bool, lower)
    made.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=accents)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    control = [token for token, kind in zip(own, kinds, strict=True) if kind == _CONTROL]
    made.add_special_tokens([AddedToken(token, special=True) for token in (*special.values(), *control)])
    return made, {option: special[name] for name, option in _NAMES.items()}


def around(container: GgufContainer, tokens: list[str], made: Any) -> Any:
    """The tokenizer's rule for tokens around one text and around a pair: [CLS] and [SEP], or RoBERTa's first and last
    token.

    tokens: the file's tokens by id. made: the tokenizer, which has them.
    """
    from tokenizers import processors

    def one(*names: str) -> str:
        found = [container.get(f"tokenizer.ggml.{name}_token_id", int) for name in names]
        numbers = [number for number in found if number is not None and 0 <= number < len(tokens)]
        return tokens[numbers[0] if numbers else _DEFAULTS[names[0]]]

    first, last = one("cls", "bos"), one("seperator", "eos")
    return processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(token, made.token_to_id(token)) for token in (first, last)],
    )


def _piece(token: str, kind: int) -> str:
    """A piece in the form of BERT's vocabulary."""
    if kind == _CONTROL:
        return token
    return token.removeprefix(_SPACE) if token.startswith(_SPACE) else f"##{token}"


def _special(container: GgufContainer, name: str, own: list[str]) -> str:
    number = container.get(f"tokenizer.ggml.{name}_token_id", int, _DEFAULTS[name])
    return own[number if 0 <= number < len(own) else 0]


def write_pooling(container: GgufContainer, folder: Path) -> None:
    """Write the pooling that a file's metadata name into `folder`, in the form of sentence-transformers; nothing if
    they name none."""
    arch = container.metadata["general.architecture"]
    kind = _POOLED.get(container.get(f"{arch}.pooling_type", int, 0))
    if kind is None:
        return
    names = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for name, path in names.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": kind}))
