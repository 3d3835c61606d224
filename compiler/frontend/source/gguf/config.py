"""The configuration of a GGUF model, by transformers' own tables of llama.cpp's keys, and what these leave out."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....errors import CheckpointError, UnsupportedModel
from .container import Container, Entry

_RENAMED = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
_RENAMED |= {"gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
_TIED = ("falcon", "bloom")  # whatever tensors there are
_NOT_DECODERS = ("t5", "umt5", "mamba")
# keys that transformers' tables leave out; they count where the configuration has such a field and no table set it
_MORE = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_ROPE = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
_SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding", "unk_token_id": "unknown"}


def read_config(container: Container) -> Any:
    """transformers' configuration; UnsupportedModel for an architecture that it has no table for."""
    from transformers import AutoConfig

    facts = _facts(container)
    kind = facts.pop("model_type")
    try:
        return AutoConfig.for_model(kind, **facts)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModel(f"{container.path}: the metadata make no {kind!r} model: {reason}") from error


def architecture_of(container: Container) -> str:
    """llama.cpp's name of the architecture; CheckpointError if the file does not say."""
    found = container.get("general.architecture", str)
    if not found:
        raise CheckpointError(f"{container.path} does not say its architecture", "icc compiles GGUF files of models")
    return found


def _facts(container: Container) -> dict[str, Any]:
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    arch = architecture_of(container)
    table = GGUF_CONFIG_MAPPING.get(_RENAMED.get(arch, arch)) or GGUF_CONFIG_MAPPING.get(arch)
    kind = _RENAMED.get(arch, arch)
    if table is None or arch in _NOT_DECODERS or arch in ("general", "tokenizer"):
        known = sorted(set(GGUF_CONFIG_MAPPING) - {"general", "tokenizer", *_NOT_DECODERS})
        raise UnsupportedModel(
            f"{container.path} has the architecture {arch!r}, which transformers cannot read from GGUF",
            f"it reads {', '.join(known)}",
        )
    facts: dict[str, Any] = {"model_type": kind, **GGUF_CONFIG_DEFAULTS_MAPPING.get(kind, {})}
    for key, field in table.items():
        value = container.metadata.get(f"{arch}.{key}")
        if field is not None and value is not None:
            facts[field] = _plain(value)
    facts["tie_word_embeddings"] = "output.weight" not in container.tensors or arch in _TIED
    for field, name in _SPECIAL.items():
        facts[field] = container.get(f"tokenizer.ggml.{name}_token_id", int)
    if (embedding := container.tensors.get("token_embd.weight")) is not None:
        facts["vocab_size"] = embedding.shape[0]
    _complete(container, arch, kind, facts)
    return facts


def _complete(container: Container, arch: str, kind: str, facts: dict[str, Any]) -> None:
    """What the tables leave out."""
    from transformers import CONFIG_MAPPING

    fields = vars(CONFIG_MAPPING[kind]()) if kind in CONFIG_MAPPING else {}
    for key, field in _MORE.items():
        value = container.metadata.get(f"{arch}.{key}")
        if value is not None and field in fields:
            facts.setdefault(field, _plain(value))
    names = container.tensors
    if "attention_bias" in fields:
        facts["attention_bias"] = "blk.0.attn_q.bias" in names or "blk.0.attn_output.bias" in names
    if "mlp_bias" in fields:
        facts["mlp_bias"] = "blk.0.ffn_up.bias" in names
    if arch == "gpt2":
        facts |= {"n_positions": facts.get("n_ctx", 1024), "n_inner": facts.pop("feed_forward_length", None)}
    if arch == "stablelm":
        facts["use_qkv_bias"] = "blk.0.attn_q.bias" in names
        facts["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in names
    if arch == "gpt-oss" and (window := container.metadata.get("gpt-oss.attention.sliding_window")) is not None:
        facts["sliding_window"] = window
    _scale_rope(container, arch, facts)


def _scale_rope(container: Container, arch: str, facts: dict[str, Any]) -> None:
    """Rotary scaling that the metadata name; factors that are one tensor are applied to the frequencies instead.
    UnsupportedModel for factors of short and of long texts, which transformers' reader leaves out."""
    if any(f"rope_factors_{length}.weight" in container.tensors for length in ("short", "long")):
        raise UnsupportedModel(
            "the file has rotary factors of its own for short and for long texts (LongRoPE), which icc does not read",
            "compile the checkpoint that it was made of",
        )
    kind, factor, original = (container.metadata.get(f"{arch}.{key}") for key in _ROPE)
    base = facts.get("rope_theta")
    if kind in ("linear", "yarn") and factor and base and not arch.startswith("gemma"):
        rope = {"rope_type": kind, "rope_theta": facts.pop("rope_theta"), "factor": float(factor)}
        if kind == "yarn" and original:
            rope["original_max_position_embeddings"] = int(original)
        facts["rope_parameters"] = rope


def _plain(value: Any) -> Any:
    """An array of equal numbers, one per layer, as the number; other arrays as lists."""
    if not isinstance(value, np.ndarray):
        return value
    values = value.tolist()
    return values[0] if values and len(set(values)) == 1 else values


def rope_factors(container: Container) -> Entry | None:
    """The tensor of what rotary frequencies are divided by, as files of Llama 3.1 and later have it."""
    return container.tensors.get("rope_freqs.weight")
