"""Rules of single architectures, for parts of the configuration that depend on several keys or on tensors.

Each rule reads the file and changes the configuration that is being made. The rules follow llama.cpp: `conversion/*.py`
writes a file, `src/models/*.cpp` reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .....runtime.format.gguf import GgufContainer
from ....errors import UnsupportedModel
from .keys import Facts, key
from .rope import factors, long_rope, partly_turned, scaling


def heads_of_gemma(layers: int) -> Callable[[GgufContainer, Facts], None]:
    """A rule: attention scores are scaled by the width of a head; in the 27B model, which has `layers` layers, by the
    model's width divided by the number of heads."""

    def adjust(container: GgufContainer, facts: Facts) -> None:
        wide = facts["hidden_size"] // facts["num_attention_heads"]
        facts["query_pre_attn_scalar"] = wide if facts["num_hidden_layers"] == layers else facts["head_dim"]

    return adjust


def gemma3(container: GgufContainer, facts: Facts) -> None:
    """Two kinds of layers: rotary frequencies are scaled in layers with full attention, and not in layers with a
    window."""
    heads_of_gemma(62)(container, facts)
    far: Facts = {"rope_type": "default"}
    kind, factor = scaling(container)
    if kind == "linear":
        far |= {"rope_type": "linear", "factor": factor}
    facts.pop("rope_theta", None)
    facts["rope_parameters"] = {"full_attention": far, "sliding_attention": {"rope_type": "default"}}


def gemma4(container: GgufContainer, facts: Facts) -> None:
    """Two kinds of layers, with heads of two widths: the wide heads rotate some of their elements. Layers may read the
    keys of other layers."""
    kinds = facts["layer_types"]
    facts["head_dim"] = key(container, "attention.key_length_swa") or facts["global_head_dim"]
    for end in ("", "_swa"):  # whole heads are rotated, or `unused.py` refuses
        if container.metadata.get(f"gemma4.rope.dimension_count{end}") == key(container, f"attention.key_length{end}"):
            key(container, f"rope.dimension_count{end}")
    groups = np.resize(key(container, "attention.head_count_kv"), len(kinds)).tolist()
    windowed = [kind == "sliding_attention" for kind in kinds]
    facts["num_key_value_heads"] = next((n for n, near in zip(groups, windowed, strict=True) if near), groups[0])
    facts["num_global_key_value_heads"] = next((n for n, near in zip(groups, windowed, strict=True) if not near), None)
    far = [f"blk.{layer}.attn_v.weight" for layer, near in enumerate(windowed) if not near]
    facts["attention_k_eq_v"] = not any(name in container.tensors for name in far)
    widths = np.atleast_1d(key(container, "feed_forward_length")).tolist()
    facts |= {"intermediate_size": min(widths), "use_double_wide_mlp": len(set(widths)) > 1}
    if (table := container.tensors.get("per_layer_token_embd.weight")) is not None:
        facts["vocab_size_per_layer_input"] = table.shape[0]
    turned = np.array(factors(container, "rope_freqs.weight") or [1.0])
    wide = {"rope_type": "proportional", "partial_rotary_factor": float((turned < 1e20).mean())}
    facts.pop("rope_theta", None)
    facts["rope_parameters"] = {"full_attention": wide, "sliding_attention": {"rope_type": "default"}}
    facts["enable_moe_block"] = bool(key(container, "expert_count"))


def deepseek(container: GgufContainer, facts: Facts) -> None:
    """Latent attention: the widths of the computed heads; the file also has those of the cache. UnsupportedModel for
    files from before April 2025."""
    width, turned = key(container, "attention.key_length_mla"), key(container, "rope.dimension_count")
    if not width or not turned:
        raise UnsupportedModel(
            f"{container.path} has latent attention in the form used before April 2025", "convert or download it again"
        )
    facts |= {"qk_nope_head_dim": width - turned, "qk_rope_head_dim": turned}
    facts["num_key_value_heads"] = facts["num_attention_heads"]
    facts["v_head_dim"] = key(container, "attention.value_length_mla")
    facts.pop("head_dim", None)
    facts["q_lora_rank"] = key(container, "attention.q_lora_rank")
    rope, scale = facts.get("rope_parameters"), key(container, "rope.scaling.yarn_log_multiplier")
    if rope and scale is not None:  # configurations hold 10 times this value
        rope |= {"mscale": 10 * float(scale), "mscale_all_dim": 10 * float(scale)}


def deepseek_v2(container: GgufContainer, facts: Facts) -> None:
    """Latent attention, and the selection of experts: within groups, or among all."""
    deepseek(container, facts)
    grouped = (facts.get("n_group") or 1) > 1
    facts["topk_method"] = "group_limited_greedy" if grouped else "greedy"


def gpt_oss(container: GgufContainer, facts: Facts) -> None:
    """YaRN whose correction range is not rounded to whole dimensions."""
    if (rope := facts.get("rope_parameters")) and rope["rope_type"] == "yarn":
        rope["truncate"] = False


def falcon(container: GgufContainer, facts: Facts) -> None:
    """The number of KV heads, one or several, which decides the form of the layer; norms and biases, if their tensors
    exist."""
    groups = facts.setdefault("num_kv_heads", 1)
    facts |= {"multi_query": groups == 1, "parallel_attn": True, "alibi": False}
    facts["new_decoder_architecture"] = groups > 1
    facts["num_ln_in_parallel_attn"] = 2 if "blk.0.attn_norm_2.weight" in container.tensors else 1
    facts["bias"] = "blk.0.attn_qkv.bias" in container.tensors


def falcon_rows(config: Any, part: str) -> Tensor | None:
    """The row numbers in the file, [rows], of the rows of Falcon's matrix of queries, keys and values in transformers'
    order. None for any other tensor.

    A file has all queries, then all keys, then all values; transformers groups them by KV head.
    """
    if part not in ("attn_qkv.weight", "attn_qkv.bias"):
        return None
    heads, groups = config.num_attention_heads, config.num_kv_heads
    if not config.new_decoder_architecture and not config.multi_query:
        groups = heads
    rows = torch.arange((heads + 2 * groups) * (config.hidden_size // heads)).view(heads + 2 * groups, -1)
    q, k, v = rows.split([heads, groups, groups])
    return torch.cat([q.view(groups, -1, rows.shape[1]), k[:, None], v[:, None]], 1).reshape(-1)


def stablelm(container: GgufContainer, facts: Facts) -> None:
    """Partly rotated heads; from their tensors, biases of queries, and whether the MLP has a norm or runs parallel to
    attention."""
    facts["use_qkv_bias"] = "blk.0.attn_q.bias" in container.tensors
    facts["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in container.tensors
    partly_turned(container, facts)


def mamba(container: GgufContainer, facts: Facts) -> None:
    """The expansion factor: the width of its state-space layers divided by the model's."""
    facts["expand"] = max(1, facts["intermediate_size"] // facts["hidden_size"])


def phi3(container: GgufContainer, facts: Facts) -> None:
    """Partly rotated heads, windows, and factors of rotary frequencies for short and for long texts."""
    partly_turned(container, facts)
    facts["sliding_window"] = facts.get("sliding_window") or None
    long_rope(container, facts)


def phimoe(container: GgufContainer, facts: Facts) -> None:
    """As `phi3`, with the scales of long texts under other names, and a bias of the LM head."""
    phi3(container, facts)
    if (rope := facts.get("rope_parameters")) and rope.get("rope_type") == "longrope":
        rope |= dict.fromkeys(("short_mscale", "long_mscale"), rope["attention_factor"])
    facts["lm_head_bias"] = "output.bias" in container.tensors


def command_r(container: GgufContainer, facts: Facts) -> None:
    """Norms of queries and keys, if their tensors exist."""
    facts["use_qk_norm"] = "blk.0.attn_q_norm.weight" in container.tensors


def ministral3(container: GgufContainer, facts: Facts) -> None:
    """YaRN as in DeepSeek; a field of the table scales scores of far positions as in Llama 4."""
    rope = facts.get("rope_parameters") or {"rope_type": "default", "rope_theta": facts.pop("rope_theta", 1e6)}
    if (scale := key(container, "rope.scaling.yarn_log_multiplier")) is not None and rope["rope_type"] == "yarn":
        rope |= {"mscale_all_dim": float(scale), "mscale": 1.0}
    original = rope.get("original_max_position_embeddings") or facts["max_position_embeddings"]
    facts["rope_parameters"] = rope | {"original_max_position_embeddings": original}


def laguna(container: GgufContainer, facts: Facts) -> None:
    """The number of heads of each layer; gates per head or per element."""
    facts["num_attention_heads_per_layer"] = np.resize(
        key(container, "attention.head_count"), facts["num_hidden_layers"]
    ).tolist()
    facts["num_attention_heads"] = heads = facts["num_attention_heads_per_layer"][0]
    gate = container.tensors.get("blk.0.attn_gate.weight")
    facts["gating"] = "per-element" if gate is not None and gate.shape[0] != heads else "per-head"
    facts["head_dim"] = key(container, "attention.key_length") or facts["hidden_size"] // heads


def bert(container: GgufContainer, facts: Facts) -> None:
    """The number of token types: one if the file has no table of them."""
    kinds = container.tensors.get("token_types.weight")
    facts["type_vocab_size"] = kinds.shape[0] if kinds is not None else 1
