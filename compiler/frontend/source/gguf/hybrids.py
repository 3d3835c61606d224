"""Rules of architectures with recurrent layers and with experts: parts of their configurations, and the order of rows.

The rules follow llama.cpp: `conversion/*.py` writes a file, `src/models/*.cpp` reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .....runtime.format.gguf import GgufContainer
from .keys import Facts, key, layer_count
from .rope import long_rope, partly_turned

Adjust = Callable[[GgufContainer, Facts], None]


def adjusted(*parts: Adjust) -> Adjust:
    """A rule that applies several rules, one after the other."""

    def adjust(container: GgufContainer, facts: Facts) -> None:
        for part in parts:
            part(container, facts)

    return adjust


def usual(container: GgufContainer, facts: Facts) -> None:
    """A rule of many architectures: partly rotated heads, and norms of queries and keys, if their tensors exist."""
    partly_turned(container, facts)
    facts["use_qk_norm"] = "blk.0.attn_q_norm.weight" in container.tensors


def kinds(attention: str, other: str, field: str = "layer_types") -> Adjust:
    """A rule for layers of two kinds: the list `field` has `attention` for layers with KV heads, and `other` for the
    rest."""

    def adjust(container: GgufContainer, facts: Facts) -> None:
        facts[field] = [attention if count else other for count in _kv_heads(container, facts)]

    return adjust


def _per_layer(container: GgufContainer, name: str) -> list[int]:
    found = key(container, name)
    return np.resize(np.atleast_1d(0 if found is None else found), layer_count(container)).tolist()


def _kv_heads(container: GgufContainer, facts: Facts) -> list[int]:
    """The number of KV heads of each layer, 0 for layers without attention. The largest is put into the
    configuration."""
    found = _per_layer(container, "attention.head_count_kv")
    facts["num_key_value_heads"] = max(found)
    return found


def lfm2(container: GgufContainer, facts: Facts) -> None:
    """Layers with convolutions and layers with attention; a bias of convolutions, if its tensors exist."""
    kinds("full_attention", "conv")(container, facts)
    facts["conv_bias"] = any(name.endswith("shortconv.conv.bias") for name in container.tensors)


def delta_rule(container: GgufContainer, facts: Facts) -> None:
    """Qwen3-Next and Qwen3.5: layers with gated delta rules, and one with attention every few layers."""
    partly_turned(container, facts)
    recurrent, every = key(container, "attention.recurrent_layers"), key(container, "full_attention_interval") or 4
    layers = facts["num_hidden_layers"]
    states = [(i + 1) % every != 0 for i in range(layers)] if recurrent is None else list(recurrent)[:layers]
    facts["layer_types"] = ["linear_attention" if state else "full_attention" for state in states]
    facts["linear_value_head_dim"] = key(container, "ssm.inner_size") // key(container, "ssm.time_step_rank")


def mamba2(prefix: str = "mamba_", head: str = "d_head") -> Adjust:
    """A rule for Mamba-2 layers of a hybrid.

    prefix: of the names of its configuration's fields. head: the name, after the prefix, of the width of a head.
    """

    def adjust(container: GgufContainer, facts: Facts) -> None:
        width, heads = (key(container, f"ssm.{name}") for name in ("inner_size", "time_step_rank"))
        facts[prefix + head] = width // heads
        facts[f"{prefix}expand" if head == "d_head" else "expand"] = max(1, width // facts["hidden_size"])
        facts["hidden_act"] = "silu"

    return adjust


def mamba2_alone(container: GgufContainer, facts: Facts) -> None:
    """A model of Mamba-2 layers only: widths and the number of heads."""
    mamba2("", "head_dim")(container, facts)
    facts["num_heads"] = key(container, "ssm.time_step_rank")


def granite(container: GgufContainer, facts: Facts) -> None:
    """Experts, if there are any; positions are rotated if the file says so."""
    facts["num_local_experts"] = key(container, "expert_count") or 0
    facts["num_experts_per_tok"] = key(container, "expert_used_count") or 0
    if key(container, "expert_shared_feed_forward_length") is None:
        facts["shared_intermediate_size"] = facts["intermediate_size"]
    facts["position_embedding_type"] = "rope" if key(container, "rope.scaling.finetuned") else "nope"


def bamba(container: GgufContainer, facts: Facts) -> None:
    """Which layers have attention, from their KV heads; partly rotated heads."""
    facts["attn_layer_indices"] = [layer for layer, count in enumerate(_kv_heads(container, facts)) if count]
    partly_turned(container, facts)


def falcon_h1(container: GgufContainer, facts: Facts) -> None:
    """Multipliers are all 1, because a file's weights include them; gates come before norms."""
    facts |= {
        "mlp_multipliers": [1.0, 1.0],
        "mamba_norm_before_gate": False,
    }
    facts |= {"ssm_multipliers": [1.0] * 5, "mamba_rms_norm": "blk.0.ssm_norm.weight" in container.tensors}


def nemotron_h(container: GgufContainer, facts: Facts) -> None:
    """Each layer is only a mixer, attention, experts or an MLP, which its tensors show."""
    groups, widths = _kv_heads(container, facts), _per_layer(container, "feed_forward_length")
    marks = {"ssm_a": "mamba", "attn_q.weight": "attention", "ffn_gate_inp.weight": "moe", "ffn_up.weight": "mlp"}
    facts["layers_block_type"] = [
        next((kind for mark, kind in marks.items() if f"blk.{layer}.{mark}" in container.tensors), "mamba")
        for layer in range(len(groups))
    ]
    facts["intermediate_size"] = max(widths)
    facts.pop("num_hidden_layers", None)
    for name in ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"):  # the second if both exist
        facts["layer_norm_epsilon"] = key(container, name) or facts.get("layer_norm_epsilon", 1e-5)


def jamba(container: GgufContainer, facts: Facts) -> None:
    """Which layers have attention, and which have experts: an offset and a period for each."""
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
    """Widths of heads of latent attention, for files with the key and value projections in one matrix."""
    long_rope(container, facts)
    turned = key(container, "rope.dimension_count")
    facts["qk_rope_head_dim"], facts["qk_nope_head_dim"] = turned, key(container, "attention.key_length") - turned
    both = container.tensors["blk.0.attn_kv_b.weight"].shape[0] // facts["num_attention_heads"]
    facts["v_head_dim"] = both - facts["qk_nope_head_dim"]
    facts.pop("head_dim", None)


def command_moe(container: GgufContainer, facts: Facts) -> None:
    """The width of experts, and that of the dense layers before them."""
    facts["prefix_dense_intermediate_size"] = facts.get("intermediate_size")
    facts["intermediate_size"] = key(container, "expert_feed_forward_length") or facts.get("intermediate_size")


# rows


def value_heads(config: Any, dims: int) -> Tensor:
    """The row numbers in the file, [heads * dims], of the rows of value heads in transformers' order; `dims` rows per
    head.

    A file has the first value head of every key head, then the second of every key head; transformers groups them by
    key head.
    """
    groups, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    return torch.arange(groups * each * dims).view(each, groups, dims).transpose(0, 1).reshape(-1)


def delta_rows(config: Any, part: str) -> Tensor | None:
    """The row numbers in the file, [rows], of the rows of a tensor of a Qwen3.5 layer in transformers' order; for the
    output projection, the column numbers.

    part: the tensor's name after "blk.N.". None if a file has transformers' order.
    """
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
    """The row numbers in the file, [rows], of the rows of Qwen3-Next's input projection in transformers' order.

    A file has the rows of all queries, then of all keys, all values and all gates; transformers groups them by key
    head.
    """
    groups, wide = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // groups * config.linear_value_head_dim
    sizes = (wide, wide, values, values)
    starts = np.cumsum([0, *(groups * size for size in sizes)])[:4].tolist()
    pieces = [start + torch.arange(groups * size).view(groups, size) for start, size in zip(starts, sizes, strict=True)]
    return torch.cat(pieces, 1).reshape(-1)
