"""Layers with states and mixtures of experts: what the metadata say of their configurations, and how rows lie.

Rules are those of llama.cpp: `conversion/*.py` writes a file, `src/models/*.cpp` reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .container import GgufContainer
from .keys import Facts, key, layer_count
from .rope import long_rope, partly_turned

Adjust = Callable[[GgufContainer, Facts], None]


def adjusted(*parts: Adjust) -> Adjust:
    """Several adjustments, one after the other."""

    def adjust(container: GgufContainer, facts: Facts) -> None:
        for part in parts:
            part(container, facts)

    return adjust


def usual(container: GgufContainer, facts: Facts) -> None:
    """What many architectures have: heads that are turned in part, norms of queries and keys."""
    partly_turned(container, facts)
    facts["use_qk_norm"] = "blk.0.attn_q_norm.weight" in container.tensors


def kinds(attention: str, other: str, field: str = "layer_types") -> Adjust:
    """Layers of two kinds: those that have keys are `attention`."""

    def adjust(container: GgufContainer, facts: Facts) -> None:
        facts[field] = [attention if count else other for count in _kv_heads(container, facts)]

    return adjust


def _per_layer(container: GgufContainer, name: str) -> list[int]:
    found = key(container, name)
    return np.resize(np.atleast_1d(0 if found is None else found), layer_count(container)).tolist()


def _kv_heads(container: GgufContainer, facts: Facts) -> list[int]:
    """Of each layer, 0 of one without attention; a configuration says those of the others."""
    found = _per_layer(container, "attention.head_count_kv")
    facts["num_key_value_heads"] = max(found)
    return found


def lfm2(container: GgufContainer, facts: Facts) -> None:
    kinds("full_attention", "conv")(container, facts)
    facts["conv_bias"] = any(name.endswith("shortconv.conv.bias") for name in container.tensors)


def delta_rule(container: GgufContainer, facts: Facts) -> None:
    """Qwen3-Next and Qwen3.5: gated delta rules and attention."""
    partly_turned(container, facts)
    recurrent, every = key(container, "attention.recurrent_layers"), key(container, "full_attention_interval") or 4
    layers = facts["num_hidden_layers"]
    states = [(i + 1) % every != 0 for i in range(layers)] if recurrent is None else list(recurrent)[:layers]
    facts["layer_types"] = ["linear_attention" if state else "full_attention" for state in states]
    facts["linear_value_head_dim"] = key(container, "ssm.inner_size") // key(container, "ssm.time_step_rank")


def mamba2(prefix: str = "mamba_", head: str = "d_head") -> Adjust:
    """Mamba-2 layers of a hybrid, by the prefix of its configuration's fields and what it calls the width of a head."""

    def adjust(container: GgufContainer, facts: Facts) -> None:
        width, heads = (key(container, f"ssm.{name}") for name in ("inner_size", "time_step_rank"))
        facts[prefix + head] = width // heads
        facts[f"{prefix}expand" if head == "d_head" else "expand"] = max(1, width // facts["hidden_size"])
        facts["hidden_act"] = "silu"

    return adjust


def mamba2_alone(container: GgufContainer, facts: Facts) -> None:
    mamba2("", "head_dim")(container, facts)
    facts["num_heads"] = key(container, "ssm.time_step_rank")


def granite(container: GgufContainer, facts: Facts) -> None:
    """Experts or none; positions are turned where a file says so."""
    facts["num_local_experts"] = key(container, "expert_count") or 0
    facts["num_experts_per_tok"] = key(container, "expert_used_count") or 0
    if key(container, "expert_shared_feed_forward_length") is None:
        facts["shared_intermediate_size"] = facts["intermediate_size"]
    facts["position_embedding_type"] = "rope" if key(container, "rope.scaling.finetuned") else "nope"


def bamba(container: GgufContainer, facts: Facts) -> None:
    facts["attn_layer_indices"] = [layer for layer, count in enumerate(_kv_heads(container, facts)) if count]
    partly_turned(container, facts)


def falcon_h1(container: GgufContainer, facts: Facts) -> None:
    """All multipliers are in the weights of a file; gates come before norms."""
    facts |= {
        "mlp_multipliers": [1.0, 1.0],
        "mamba_norm_before_gate": False,
    }
    facts |= {"ssm_multipliers": [1.0] * 5, "mamba_rms_norm": "blk.0.ssm_norm.weight" in container.tensors}


def nemotron_h(container: GgufContainer, facts: Facts) -> None:
    """Layers that are one thing each, told by the tensors they have."""
    groups, widths = _kv_heads(container, facts), _per_layer(container, "feed_forward_length")
    marks = {"ssm_a": "mamba", "attn_q.weight": "attention", "ffn_gate_inp.weight": "moe", "ffn_up.weight": "mlp"}
    facts["layers_block_type"] = [
        next((kind for mark, kind in marks.items() if f"blk.{layer}.{mark}" in container.tensors), "mamba")
        for layer in range(len(groups))
    ]
    facts["intermediate_size"] = max(widths)
    facts.pop("num_hidden_layers", None)
    for name in ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"):  # the latter, where both are
        facts["layer_norm_epsilon"] = key(container, name) or facts.get("layer_norm_epsilon", 1e-5)


def jamba(container: GgufContainer, facts: Facts) -> None:
    groups = _kv_heads(container, facts)
    experts = [f"blk.{layer}.ffn_gate_inp.weight" in container.tensors for layer in range(len(groups))]
    for name, found in (("attn", groups), ("expert", experts)):
        where = [layer for layer, there in enumerate(found) if there]
        facts[f"{name}_layer_offset"] = where[0] if where else len(found)
        facts[f"{name}_layer_period"] = where[1] - where[0] if len(where) > 1 else len(found) + 1
    facts["mamba_expand"] = key(container, "ssm.inner_size") // facts["hidden_size"]
    if not any(experts):
        facts |= {"num_experts": 1, "num_experts_per_tok": 1}


def latent(container: GgufContainer, facts: Facts) -> None:
    """Widths of heads of latent attention whose products are not taken apart."""
    long_rope(container, facts)
    turned = key(container, "rope.dimension_count")
    facts["qk_rope_head_dim"], facts["qk_nope_head_dim"] = turned, key(container, "attention.key_length") - turned
    both = container.tensors["blk.0.attn_kv_b.weight"].shape[0] // facts["num_attention_heads"]
    facts["v_head_dim"] = both - facts["qk_nope_head_dim"]
    facts.pop("head_dim", None)


def command_moe(container: GgufContainer, facts: Facts) -> None:
    """The width of experts and that of dense layers before them."""
    facts["prefix_dense_intermediate_size"] = facts.get("intermediate_size")
    facts["intermediate_size"] = key(container, "expert_feed_forward_length") or facts.get("intermediate_size")


# rows


def value_heads(config: Any, dims: int) -> Tensor:
    """Where a file has the rows of the value heads, `dims` of each: it has the first of all key heads, then the second,
    where transformers has those of a key head together."""
    groups, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    return torch.arange(groups * each * dims).view(each, groups, dims).transpose(0, 1).reshape(-1)


def delta_rows(config: Any, part: str) -> Tensor | None:
    """Of Qwen3.5: the rows of a layer's tensor, of the last product the columns, in transformers' order, by its name in
    the file; None where they lie so."""
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    dims = {"attn_gate.weight": config.linear_value_head_dim} | dict.fromkeys(
        ("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"), 1
    )
    if part in dims:
        return value_heads(config, dims[part])
    if part == "ssm_out.weight":
        return value_heads(config, config.linear_value_head_dim)
    if part in ("attn_qkv.weight", "ssm_conv1d.weight"):
        return torch.cat([torch.arange(before), before + value_heads(config, config.linear_value_head_dim)])
    return None


def interleaved_rows(config: Any) -> Tensor:
    """Of Qwen3-Next: the rows of queries, keys, values and gates, all of one kind together in a file, head of keys by
    head of keys."""
    groups, wide = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // groups * config.linear_value_head_dim
    sizes = (wide, wide, values, values)
    starts = np.cumsum([0, *(groups * size for size in sizes)])[:4].tolist()
    pieces = [start + torch.arange(groups * size).view(groups, size) for start, size in zip(starts, sizes, strict=True)]
    return torch.cat(pieces, 1).reshape(-1)
