"""The configuration of a GGUF model, by transformers' own tables of llama.cpp's keys, and what these leave out."""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np

from ....errors import CheckpointError, UnsupportedModel
from .architectures import ARCHITECTURES, Architecture, found_architecture
from .container import Container, Entry
from .keys import FIELDS

_TIED = ("falcon", "bloom")  # whatever tensors there are
_NOT_DECODERS = ("t5", "umt5", "general", "tokenizer")
_ROPE = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
_SCALINGS = ("none", "linear", "yarn", "longrope")
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
_SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding", "unk_token_id": "unknown"}


def read_config(container: Container) -> Any:
    """transformers' configuration; UnsupportedModel for an architecture that it has no table for."""
    from transformers import AutoConfig

    _plausible(container)
    facts = _facts(container)
    kind = facts.pop("model_type")
    try:
        return AutoConfig.for_model(kind, **facts)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModel(f"{container.path}: the metadata make no {kind!r} model: {reason}") from error


def _plausible(container: Container) -> None:
    """No number of the metadata makes more than the tensors are, and none is no number."""
    arch = architecture_of(container)
    layers = container.get(f"{arch}.block_count", int, 0)
    if layers > len(container.tensors):
        raise CheckpointError(f"{container.path}: {layers} layers are said to be in {len(container.tensors)} tensors")
    for key in ("rope.freq_base", "rope.freq_base_swa", "rope.scaling.factor"):
        value = container.get(f"{arch}.{key}", (int, float), 1.0)
        if not (isfinite(value) and (value > 0 or "scaling" in key)):
            raise CheckpointError(f"{container.path}: metadata '{arch}.{key}' is {value}")
    kind = container.get(f"{arch}.rope.scaling.type", str, "none")
    if kind not in _SCALINGS:
        raise UnsupportedModel(f"{container.path} has rotary scaling of the kind {kind!r}", f"icc reads {_SCALINGS}")


def special_token(container: Container, name: str) -> int | None:
    """The id of a token by llama.cpp's name of what it is for; None where there is none, which some files write as the
    largest number."""
    found = container.get(f"tokenizer.ggml.{name}_token_id", int)
    return None if found in (-1, 2**32 - 1) else found


def architecture_of(container: Container) -> str:
    """llama.cpp's name of the architecture; CheckpointError if the file does not say."""
    found = container.get("general.architecture", str)
    if not found:
        raise CheckpointError(f"{container.path} does not say its architecture", "icc compiles GGUF files of models")
    return found


def architecture(container: Container) -> Architecture:
    """Which of transformers' model types the file is; UnsupportedModel for one that it cannot be read as."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    arch = architecture_of(container)
    if (found := found_architecture(container, arch)) is not None:
        return found
    readable = set(GGUF_CONFIG_MAPPING) - {a.kind for a in ARCHITECTURES.values()} - set(_NOT_DECODERS)
    if arch not in readable:
        raise UnsupportedModel(
            f"{container.path} has the architecture {arch!r}, which icc has no table for",
            f"compile the checkpoint that it was made of; icc reads {', '.join(sorted({*ARCHITECTURES, *readable}))}",
        )
    return Architecture(arch)


def _facts(container: Container) -> dict[str, Any]:
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    arch, own = architecture_of(container), architecture(container)
    table = GGUF_CONFIG_MAPPING.get(own.kind) or GGUF_CONFIG_MAPPING.get(arch) or {}
    table = table if own.kind != "mixtral" else {}
    facts: dict[str, Any] = {"model_type": own.kind, **GGUF_CONFIG_DEFAULTS_MAPPING.get(own.kind, {})}
    for key, field in {**table, **own.fields}.items():
        value = container.metadata.get(f"{arch}.{key}")
        if field is not None and value is not None:
            facts[field] = _plain(value)
    facts["tie_word_embeddings"] = "output.weight" not in container.tensors or arch in _TIED
    for field, name in _SPECIAL.items():
        facts[field] = special_token(container, name)
    if (embedding := container.tensors.get("token_embd.weight")) is not None:
        facts["vocab_size"] = embedding.shape[0]
    _complete(container, own.kind, facts)
    if ahead := container.get(f"{arch}.nextn_predict_layers", int, 0):
        facts["num_hidden_layers"] -= ahead  # the last ones guess, which `weights_of` leaves out
    facts |= own.fixed
    if own.adjust is not None:
        own.adjust(container, facts)
    return facts


def _complete(container: Container, kind: str, facts: dict[str, Any]) -> None:
    """What the tables leave out."""
    from transformers import CONFIG_MAPPING

    arch = architecture_of(container)
    made = CONFIG_MAPPING[kind]() if kind in CONFIG_MAPPING else None
    fields = {**vars(made), **made.attribute_map} if made is not None else {}
    for key, names in FIELDS.items():
        value = container.metadata.get(f"{arch}.{key}")
        name = next((name for name in names if name in fields or name == "rope_theta"), None)
        if value is not None and name is not None and not any(other in facts for other in names):
            facts[name] = _plain(value)
    heads, wide = facts.get("num_attention_heads"), facts.get("hidden_size")
    if "head_dim" in fields and not isinstance(heads, list) and heads and wide and wide % heads == 0:
        facts["head_dim"] = container.metadata.get(f"{arch}.attention.key_length", wide // heads)
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
    _scale_rope(container, arch, facts)
    kind = (fields.get("rope_parameters") or {}).get("rope_type", "default")
    if kind != "default" and facts.get("rope_theta") and "rope_parameters" not in facts:
        facts["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": facts.pop("rope_theta"),
        }  # the type's own is none


def _scale_rope(container: Container, arch: str, facts: dict[str, Any]) -> None:
    """Rotary scaling that the metadata name; factors that are one tensor are applied to the frequencies instead."""
    kind, factor, original = (container.metadata.get(f"{arch}.{key}") for key in _ROPE)
    if kind is None and (old := container.get(f"{arch}.rope.scale_linear", (int, float))):
        kind, factor = "linear", old  # of before October 2023
    base = facts.get("rope_theta")
    if kind in ("linear", "yarn") and factor and base and not arch.startswith("gemma"):
        rope = {"rope_type": kind, "rope_theta": facts.pop("rope_theta"), "factor": float(factor)}
        if kind == "yarn":
            found = {name: container.metadata.get(f"{arch}.rope.scaling.{key}") for key, name in _YARN.items()}
            rope |= {name: float(value) for name, value in found.items() if value is not None}
            rope |= {"truncate": False} if arch == "gpt-oss" else {}
            rope |= {"original_max_position_embeddings": int(original)} if original else {}
        facts["rope_parameters"] = rope


def _plain(value: Any) -> Any:
    """An array of equal numbers, one per layer, as the number; other arrays as lists."""
    if not isinstance(value, np.ndarray):
        return value
    values = value.tolist()
    return values[0] if values and len(set(values)) == 1 else values


def rope_factors(container: Container) -> Entry | None:
    """The tensor of what rotary frequencies are divided by, as files of Llama 3.1 and later have it."""
    proportional = architecture_of(container) == "gemma4"  # which say what the configuration does
    return None if proportional else container.tensors.get("rope_freqs.weight")
