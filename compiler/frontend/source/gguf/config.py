"""The configuration of a GGUF model, by transformers' own tables of llama.cpp's keys, and what these leave out."""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np

from ....errors import CheckpointError, UnsupportedModel
from .architectures import ARCHITECTURES, Architecture, found_architecture
from .container import Container
from .keys import FIELDS, Facts, key, layer_count
from .rope import check_rope, scale_rope
from .unused import refuse_unused
from .windows import place_windows, turn_by_kind

_TIED = ("falcon", "bloom")  # whatever tensors there are
_NOT_DECODERS = ("t5", "umt5", "general", "tokenizer")
_ALWAYS = ("model_type", "rope_theta", "head_dim")
# of experts, where a file does not say
_ABSENT = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
_POSITIVE = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding", "unk_token_id": "unknown"}


def read_config(container: Container) -> Any:
    """transformers' configuration; UnsupportedModel for an architecture that it has no table for."""
    from transformers import AutoConfig

    architecture(container)
    _plausible(container)
    try:
        facts = _facts(container)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # which rules ask for
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise CheckpointError(f"{container.path}: metadata of the architecture lack or are wrong ({reason})") from error
    kind = facts.pop("model_type")
    try:
        config = AutoConfig.for_model(kind, **facts)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModel(f"{container.path}: the metadata make no {kind!r} model: {reason}") from error
    refuse_unused(container, config)
    return config


def _plausible(container: Container) -> None:
    """No number of the metadata makes more than the tensors are, and none is no number."""
    arch = architecture_of(container)
    for name in ("block_count", "embedding_length"):
        if container.get(f"{arch}.{name}", int, 0) < 1:
            raise CheckpointError(
                f"{container.path}: metadata '{arch}.{name}' is {container.metadata.get(f'{arch}.{name}')}"
            )
    table, wide = container.tensors.get("token_embd.weight"), container.metadata[f"{arch}.embedding_length"]
    if table is not None and table.shape[-1] != wide:
        raise CheckpointError(f"{container.path}: embeddings have {table.shape[-1]} values, {wide} are said")
    layers, ahead = (container.get(f"{arch}.{name}", int, 0) for name in ("block_count", "nextn_predict_layers"))
    if layers > len(container.tensors):
        raise CheckpointError(f"{container.path}: {layers} layers are said to be in {len(container.tensors)} tensors")
    if not 0 <= ahead <= layers:
        raise CheckpointError(f"{container.path}: {ahead} of {layers} layers are said to guess")
    for name in _POSITIVE:
        value = container.get(f"{arch}.{name}", (int, float), 1.0)
        if not (isfinite(value) and value >= 0):
            raise CheckpointError(f"{container.path}: metadata '{arch}.{name}' is {value}")
    check_rope(container, arch)


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
    from transformers import CONFIG_MAPPING
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    arch = architecture_of(container)
    if (found := found_architecture(container, arch)) is not None:
        return found
    readable = (set(GGUF_CONFIG_MAPPING) & set(CONFIG_MAPPING)) - {a.kind for a in ARCHITECTURES.values()}
    readable -= set(_NOT_DECODERS)
    if arch not in readable:
        raise UnsupportedModel(
            f"{container.path} has the architecture {arch!r}, which icc has no table for",
            f"compile the checkpoint that it was made of; icc reads {', '.join(sorted({*ARCHITECTURES, *readable}))}",
        )
    return Architecture(arch)


def _facts(container: Container) -> Facts:
    from transformers import CONFIG_MAPPING

    arch, own = architecture_of(container), architecture(container)
    made = CONFIG_MAPPING[own.kind]()
    fields = {**vars(made), **made.attribute_map}
    facts, placed = _placed(container, arch, own, fields)
    _complete(container, arch, fields, facts)
    facts |= own.fixed
    if "layer_types" in fields and ("sliding_window" in fields or "local_attention" in fields):
        place_windows(container, arch, facts)
    if own.adjust is not None:
        own.adjust(container, facts)
    rope = fields.get("rope_parameters") or {}
    if "full_attention" in rope and not arch.startswith("gemma"):
        turn_by_kind(container, facts)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:  # whole heads but where a file says
        rope = facts.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": facts.pop("rope_theta", 1e4)})
        rope.setdefault("partial_rotary_factor", 1.0)
    for full, field in placed.items():  # what an adjustment took away it used
        if field not in facts or (field in fields and facts[field] == _plain(container.metadata[full])):
            container.used.add(full)
    # what configurations do not have they would keep all the same
    unknown = set(placed.values()) - {*fields, *_ALWAYS}
    return {name: value for name, value in facts.items() if name not in unknown}


def _placed(container: Container, arch: str, own: Architecture, fields: Facts) -> tuple[Facts, dict[str, str]]:
    """What the tables of names give, and by which keys."""
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    table = GGUF_CONFIG_MAPPING.get(own.kind) or GGUF_CONFIG_MAPPING.get(arch) or {}
    table = table if own.kind != "mixtral" else {}
    facts: Facts = {"model_type": own.kind, **GGUF_CONFIG_DEFAULTS_MAPPING.get(own.kind, {})}
    placed: dict[str, str] = {}

    def place(name: str, field: str | None) -> None:
        value = container.metadata.get(f"{arch}.{name}")
        if field is not None and value is not None:
            facts[field], placed[f"{arch}.{name}"] = _plain(value), field

    for name, field in {**table, **own.fields}.items():
        place(name, field)
    for name, names in FIELDS.items():
        if not any(other in facts for other in names):
            place(name, next((field for field in names if field in fields or field == "rope_theta"), None))
    return facts, placed


def _complete(container: Container, arch: str, fields: Facts, facts: Facts) -> None:
    """What the tables of names leave out."""
    names = container.tensors
    layers = layer_count(container)
    facts |= {name: layers for name in ("num_hidden_layers", "n_layer") if name in facts}
    facts["tie_word_embeddings"] = "output.weight" not in names or arch in _TIED
    for field, name in _SPECIAL.items():
        facts[field] = special_token(container, name)
    if (embedding := names.get("token_embd.weight")) is not None:
        facts["vocab_size"] = embedding.shape[0]
    heads, wide = facts.get("num_attention_heads"), facts.get("hidden_size")
    if "head_dim" in fields and not isinstance(heads, list) and heads and wide:
        width = key(container, "attention.key_length") or (wide // heads if wide % heads == 0 else None)
        facts |= {"head_dim": width} if width else {}
    if "attention_bias" in fields:
        facts["attention_bias"] = "blk.0.attn_q.bias" in names or "blk.0.attn_output.bias" in names
    if "mlp_layer_types" in fields:
        first = key(container, "leading_dense_block_count") or 0
        dense = [layer < first or f"blk.{layer}.ffn_up.weight" in names for layer in range(layers)]
        facts["mlp_layer_types"] = ["dense" if there else "sparse" for there in dense]
    if "mlp_bias" in fields:
        facts["mlp_bias"] = "blk.0.ffn_up.bias" in names
    if arch == "gpt2":
        facts |= {"n_positions": facts.get("n_ctx", 1024), "n_inner": facts.pop("feed_forward_length", None)}
    if arch == "stablelm":
        facts["use_qkv_bias"] = "blk.0.attn_q.bias" in names
        facts["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in names
    facts |= {name: value for name, value in _ABSENT.items() if fields.get(name) is not None and name not in facts}
    rope = fields.get("rope_parameters")
    if rope is not None and "rope_theta" in (rope.get("full_attention") or rope):
        facts.setdefault("rope_theta", 10000.0)  # as llama.cpp has it where a file does not say
    if rope is not None and not arch.startswith("gemma"):
        scale_rope(container, facts, truncate=arch != "gpt-oss")
    kind = (rope or {}).get("rope_type", "default")
    if kind != "default" and facts.get("rope_theta") and "rope_parameters" not in facts:
        facts["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": facts.pop("rope_theta"),
        }  # the type's own is none


def _plain(value: Any) -> Any:
    """An array of equal numbers, one per layer, as the number; other arrays as lists."""
    if not isinstance(value, np.ndarray):
        return value
    values = value.tolist()
    return values[0] if values and len(set(values)) == 1 else values
