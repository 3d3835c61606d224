"""Pre-tokenizer rules that transformers' reader of GGUF files lacks: how text is split into words before BPE.

A file names its rule (`tokenizer.ggml.pre`); the rules are llama.cpp's (src/llama-vocab.cpp), taken from the tokenizers
of the models. Each expression splits the results of the one before it.
"""

from __future__ import annotations

import json
from typing import Any

from ....errors import UnsupportedModel

_CONTROL, _USERS = 3, 4  # types of tokens that are matched as a whole
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
_ALIKE = {
    "qwen2": ("stablelm2", "hunyuan", "solar-open", "grok-2"),
    "llama3": ("chatglm-bpe", "glm4", "glm5"),
}  # fmt: skip
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_HAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_V3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_RULES: dict[str, tuple[str, ...]] = {
    "deepseek-llm": (
        r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$", _HAN, r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    "deepseek-v3": _V3, "hunyuan-dense": _V3, "joyai-llm": _V3, "hy_v4": _V3,
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    "seed-coder": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "bloom": (" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",),
}  # fmt: skip
_RULES |= dict.fromkeys(("poro-chat", "gpt3-finnish"), _RULES["bloom"])
# rules equal to GPT-2's, which is transformers' default
_PLAIN = (
    "default", "gpt-2", "phi-2", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code",
    "roberta-bpe", "gigachat", "a.x-4.0", "mellum", "modern-bert", "mpt", "olmo", "jais", "trillion", "granite-docling",
    "exaone4",
)  # fmt: skip
# rules with ignore_merges: a word that is a token is not split, whatever the merges say
_WHOLE = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
    "glm4", "glm5",
)  # fmt: skip


def completed_splits(made: Any, facts: dict[str, Any]) -> Any:
    """A tokenizer of the `tokenizers` library that transformers made, completed by the rule that the file names.

    facts: the file's, by transformers' names. UnsupportedModel for an unknown rule: its tokens would differ from those
    that the model was trained on.
    """
    from tokenizers import normalizers

    if facts.get("tokenizer_type") == "llama":
        if made.pre_tokenizer is not None and "Metaspace" in str(made.pre_tokenizer):
            # a space before every text, even one that begins with a space
            lead = [normalizers.Prepend("\u2581")] if facts.get("add_prefix_space", True) else []
            made.normalizer = normalizers.Sequence([*lead, normalizers.Replace(" ", "\u2581")])
            made.pre_tokenizer = None
    if facts.get("tokenizer_type") != "gpt2":
        return made
    made = _spaces_as_tokens(made, facts)
    _cut(made, facts.get("pre_tokenizer_type") or "default")
    return made


def _cut(made: Any, rule: str) -> None:
    """Set the pre-tokenizer of byte-level BPE by a rule. UnsupportedModel for an unknown rule."""
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if rule in _WHOLE:
        made.model.ignore_merges = True
    same = next((known for known, others in _ALIKE.items() if rule in others), rule)
    if rule in _DIGITS:
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif rule in _RULES or same != rule:
        cuts = _RULES.get(rule) or (GGUF_PRE_TOKENIZER_SPLITS[same],)
        splits = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in cuts]
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    elif rule not in _PLAIN and rule not in GGUF_PRE_TOKENIZER_SPLITS:
        raise UnsupportedModel(
            f"the file cuts text by the rule {rule!r} (tokenizer.ggml.pre), which icc does not know",
            "compile the checkpoint that the file was made of",
        )


def _spaces_as_tokens(made: Any, facts: dict[str, Any]) -> Any:
    """The tokenizer with special and user-defined tokens that are not written in GPT-2's byte alphabet, such as runs of
    spaces, matched before text is split. transformers encodes them in that alphabet, so that they are never found or
    hide others."""
    from tokenizers import AddedToken, Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spelling = bytes_to_unicode()
    alphabet, kinds = set(spelling.values()), facts.get("token_type") or ()
    users = [
        (number, token)
        for number, (token, kind) in enumerate(zip(facts["tokens"], kinds, strict=False))
        if kind in (_CONTROL, _USERS) and not set(token) <= alphabet
    ]
    if not users:
        return made
    whole, own = json.loads(made.to_str()), {token: number for number, token in enumerate(facts["tokens"])}
    vocabulary, found = whole["model"]["vocab"], []
    merged = {"".join(pair) if isinstance(pair, list) else pair.replace(" ", "") for pair in whole["model"]["merges"]}
    for number, token in users:
        spelled = "".join(spelling[byte] for byte in token.encode())
        if vocabulary.get(spelled) == number and (spelled in own or spelled not in merged):
            del vocabulary[spelled]
            vocabulary |= {token: number, **({spelled: own[spelled]} if spelled in own else {})}
            found.append(AddedToken(token, normalized=False, special=kinds[number] == _CONTROL))
    made = Tokenizer.from_str(json.dumps(whole))
    made.add_tokens(found)
    return made
