"""Makes the configuration of a GGUF model from the table of its keys, its tensors and the rules of its architecture."""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np

from .....runtime.format.gguf import GgufContainer
from ....errors import CheckpointError, UnsupportedModel
from .architectures import ARCHITECTURES, Architecture, found_architecture
from .fields import said
from .keys import Facts, key, layer_count
from .rope import check_rope, rope_parameters, scale_rope
from .unused import refuse_unused
from .windows import place_windows, turn_by_kind

_POSITIVE = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_NO_MODEL = {  # by the value of general.type
    "mmproj": ("what turns images or sounds into tokens", "give the model's own GGUF file: icc compiles it for texts"),
    "imatrix": ("statistics of activations", "give the model's GGUF file"),
    "adapter": ("an adapter", "merge it when its model is compiled: icc compile MODEL --lora FILE"),
}
_SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding", "unk_token_id": "unknown"}


def read_config(container: GgufContainer) -> Any:
    """transformers' configuration of a file.

    UnsupportedModel for an architecture without a table, a key that nothing reads, or metadata that make no model;
    CheckpointError if metadata are missing or wrong.
    """
    from transformers import AutoConfig

    container.used.clear()
    architecture(container)
    _plausible(container)
    try:
        facts = _facts(container)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # keys that rules need
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise CheckpointError(f"{container.path}: metadata of the architecture lack or are wrong ({reason})") from error
    kind = facts.pop("model_type")
    try:
        config = AutoConfig.for_model(kind, **facts)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModel(f"{container.path}: the metadata make no {kind!r} model: {reason}") from error
    refuse_unused(container, architecture(container), config)
    return config


def _plausible(container: GgufContainer) -> None:
    """Check that no number in the metadata implies more elements than the tensors have, and that none is NaN."""
    arch = architecture_of(container)
    for name in ("block_count", "embedding_length"):
        if container.get(f"{arch}.{name}", int, 0) < 1:
            found = container.metadata.get(f"{arch}.{name}")
            raise CheckpointError(f"{container.path}: metadata '{arch}.{name}' is {found}, not 1 or more")
    table, wide = container.tensors.get("token_embd.weight"), container.metadata[f"{arch}.embedding_length"]
    if table is not None and table.shape[-1] != wide:
        raise CheckpointError(f"{container.path}: embeddings have {table.shape[-1]} values, its metadata say {wide}")
    layers, ahead = (container.get(f"{arch}.{name}", int, 0) for name in ("block_count", "nextn_predict_layers"))
    if layers > len(container.tensors):
        raise CheckpointError(
            f"{container.path}: its metadata say {layers} layers, it has {len(container.tensors)} tensors"
        )
    if not 0 <= ahead <= layers:
        raise CheckpointError(f"{container.path}: its metadata say that {ahead} of {layers} layers guess")
    if not any(container.metadata.get(f"{arch}.{name}") is not None for name in _POSITIVE):
        raise CheckpointError(f"{container.path}: metadata '{arch}.{_POSITIVE[0]}' is missing")
    for name in _POSITIVE:
        value = container.get(f"{arch}.{name}", (int, float), 1.0)
        if not (isfinite(value) and value >= 0):
            raise CheckpointError(f"{container.path}: metadata '{arch}.{name}' is {value}, not a number from 0 on")
    check_rope(container, arch)


def special_token(container: GgufContainer, name: str) -> int | None:
    """The id of the token that llama.cpp calls `name`, such as "eos"; None if there is none, which some files write as
    -1 or as the largest integer."""
    found = container.get(f"tokenizer.ggml.{name}_token_id", int)
    return None if found in (-1, 2**32 - 1) else found


def architecture_of(container: GgufContainer) -> str:
    """llama.cpp's name of the file's architecture; CheckpointError if the file does not state it."""
    found = container.get("general.architecture", str)
    if not found:
        raise CheckpointError(f"{container.path} does not say its architecture", "icc compiles GGUF files of models")
    return found


def architecture(container: GgufContainer) -> Architecture:
    """The table's entry for a file. UnsupportedModel for an architecture that the table lacks, and for a file that is
    no model."""
    kind = str(container.metadata.get("general.type"))
    if container.metadata.get("general.architecture") == "clip":  # such files may have no general.type
        kind = "mmproj"
    if kind in _NO_MODEL:
        what, hint = _NO_MODEL[kind]
        raise UnsupportedModel(f"{container.path} is no model: it holds {what}", hint)
    arch = architecture_of(container)
    if (found := found_architecture(container, arch)) is None:
        raise UnsupportedModel(
            f"{container.path} has the architecture {arch!r}, which icc has no table for",
            f"compile the checkpoint that it was made of; icc reads {', '.join(sorted(ARCHITECTURES))}",
        )
    return found


def _facts(container: GgufContainer) -> Facts:
    from transformers import CONFIG_MAPPING

    arch, own = architecture_of(container), architecture(container)
    made = CONFIG_MAPPING[own.kind]()
    fields = {**vars(made), **made.attribute_map}
    facts, placed = _placed(container, arch, own, fields)
    _complete(container, own, fields, facts)
    facts |= own.fixed
    if "layer_types" in fields and ("sliding_window" in fields or "local_attention" in fields):
        place_windows(container, own, facts)
    if own.adjust is not None:
        own.adjust(container, facts)
    rope = fields.get("rope_parameters") or {}
    if "full_attention" in rope and own.scales_rope:
        turn_by_kind(container, facts)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:  # whole heads are rotated unless a file says otherwise
        rope_parameters(facts).setdefault("partial_rotary_factor", 1.0)
    _place_inside(container, arch, own, facts)
    for full, name in placed.items():  # a fact that `adjust` removed was used by it
        if name not in facts or facts[name] == _plain(container.metadata[full]):
            container.used.add(full)
    return facts


def _placed(container: GgufContainer, arch: str, own: Architecture, fields: Facts) -> tuple[Facts, dict[str, str]]:
    """The configuration values from the table of keys, and the key of each. Values inside a dict, "a.b", are left to
    `_place_inside`."""
    facts: Facts = {"model_type": own.kind}
    placed: dict[str, str] = {}
    for field, value in said(own.table, container.metadata, arch):
        name = field.place(fields)
        if name is not None and "." not in name and not any(other in facts for other in field.names):
            facts[name], placed[f"{arch}.{field.key}"] = _plain(value), name
    return facts, placed


def _place_inside(container: GgufContainer, arch: str, own: Architecture, facts: Facts) -> None:
    """Set the values at paths such as "rope_parameters.rope_theta", in dicts that rules may have made, from the table
    of keys."""
    for field in own.table.values():
        if not isinstance(field.path, str) or "." not in field.path:
            continue
        full = f"{arch}.{field.key}"
        first, *path, name = field.path.split(".")
        inside = rope_parameters(facts) if first == "rope_parameters" else facts[first]
        for part in path:
            inside = inside[part]
        value = container.metadata.get(full, field.default)
        if value is not None:
            inside[name] = _plain(value)
        container.used.add(full)


def _complete(container: GgufContainer, own: Architecture, fields: Facts, facts: Facts) -> None:
    """Add the facts that the table of keys lacks: those shown by the presence of tensors, and defaults."""
    names = container.tensors
    layers = layer_count(container)
    facts |= {name: layers for name in ("num_hidden_layers",) if name in facts}
    facts["tie_word_embeddings"] = "output.weight" not in names
    for name, token in _SPECIAL.items():
        facts[name] = special_token(container, token)
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
    for field in own.table.values():
        name = field.place(fields)
        if field.default is not None and name is not None and fields.get(name) is not None:
            facts.setdefault(name, field.default)
    _complete_rope(container, own, fields, facts)


def _complete_rope(container: GgufContainer, own: Architecture, fields: Facts, facts: Facts) -> None:
    rope = fields.get("rope_parameters")
    if rope is not None and "rope_theta" in (rope.get("full_attention") or rope):
        facts.setdefault("rope_theta", 10000.0)  # llama.cpp's default
    if rope is not None and own.scales_rope:
        scale_rope(container, facts)
    kind = (rope or {}).get("rope_type", "default")
    if (
        kind != "default" and facts.get("rope_theta") and "rope_parameters" not in facts
    ):  # the model type's default is another kind
        facts["rope_parameters"] = {"rope_type": "default", "rope_theta": facts.pop("rope_theta")}


def _plain(value: Any) -> Any:
    """An array of equal numbers, one per layer, as a single number; other arrays as lists."""
    if not isinstance(value, np.ndarray):
        return value
    values = value.tolist()
    return values[0] if values and len(set(values)) == 1 else values
