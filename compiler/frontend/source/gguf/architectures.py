"""What llama.cpp's architectures are among transformers' model types, beyond transformers' own tables.

Keys and rules are those of llama.cpp: `conversion/*.py` writes a file, `src/models/*.cpp` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ....errors import UnsupportedModel
from ..checkpoint import mapped
from .container import Container

Facts = dict[str, Any]
_SOFTMAX = 1  # of `expert_gating_func`


@dataclass(frozen=True)
class Architecture:
    """kind: transformers' model type. fields: keys of the file, behind its architecture's name, and what they are in
    the configuration, beside `FIELDS`. names: ends of transformers' names of a layer's parameters, and what the file
    calls them behind "blk.N.", where the gguf package does not know. like: the architecture whose tensors lie as this
    one's do, where transformers undoes that. fixed: what all models of the kind have. turned_experts: transformers has
    their matrices [in, out], gate and up in turns. adjust: the rest."""

    kind: str
    fields: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    like: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    turned_experts: bool = False
    adjust: Callable[[Container, Facts], None] | None = None


# keys of every architecture: the first of the names that the configuration has
FIELDS: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "rope.freq_base": ("rope_theta",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
_GRANITE = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
_MAMBA2 = {"ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size", "ssm.group_count": "n_groups"}
_DEEPSEEK = {
    "attention.kv_lora_rank": "kv_lora_rank", "leading_dense_block_count": "first_k_dense_replace",
    "expert_shared_count": "n_shared_experts", "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob", "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
}  # fmt: skip


def _heads_of_gemma(layers: int) -> Callable[[Container, Facts], None]:
    """The scale of attention is one of the head, but that of the model with so many layers (27B) of the width."""

    def adjust(container: Container, facts: Facts) -> None:
        wide = facts["hidden_size"] // facts["num_attention_heads"]
        facts["query_pre_attn_scalar"] = wide if facts["num_hidden_layers"] == layers else facts["head_dim"]

    return adjust


def _gemma3(container: Container, facts: Facts) -> None:
    """Layers that see all have rotary scaling, those with a window none."""
    _heads_of_gemma(62)(container, facts)
    far: Facts = {"rope_type": "default", "rope_theta": facts.pop("rope_theta", None) or 1e6}
    kind, factor = (_key(container, f"rope.scaling.{name}") for name in ("type", "factor"))
    if kind == "linear" and factor:
        far |= {"rope_type": "linear", "factor": float(factor)}
    near = {"rope_type": "default", "rope_theta": _key(container, "rope.freq_base_swa") or 1e4}
    facts["rope_parameters"] = {"full_attention": far, "sliding_attention": near}
    _layer_types(container, facts)


def _gemma4(container: Container, facts: Facts) -> None:
    """Heads of two widths, rotary frequencies of a part of the wide ones, layers that read the keys of others."""
    _layer_types(container, facts)
    kinds = facts["layer_types"]
    facts["head_dim"] = _key(container, "attention.key_length_swa") or facts["global_head_dim"]
    groups = np.resize(container.metadata["gemma4.attention.head_count_kv"], len(kinds)).tolist()
    windowed = [kind == "sliding_attention" for kind in kinds]
    facts["num_key_value_heads"] = next((n for n, near in zip(groups, windowed, strict=True) if near), groups[0])
    facts["num_global_key_value_heads"] = next((n for n, near in zip(groups, windowed, strict=True) if not near), None)
    far = [f"blk.{layer}.attn_v.weight" for layer, near in enumerate(windowed) if not near]
    facts["attention_k_eq_v"] = not any(name in container.tensors for name in far)
    widths = np.atleast_1d(container.metadata["gemma4.feed_forward_length"]).tolist()
    facts |= {"intermediate_size": min(widths), "use_double_wide_mlp": len(set(widths)) > 1}
    facts["num_kv_shared_layers"] = _key(container, "attention.shared_kv_layers") or 0
    facts["hidden_size_per_layer_input"] = _key(container, "embedding_length_per_layer_input") or 0
    if (table := container.tensors.get("per_layer_token_embd.weight")) is not None:
        facts["vocab_size_per_layer_input"] = table.shape[0]
    turned = np.array(_factors(container, "rope_freqs.weight") or [1.0])
    wide = {"rope_type": "proportional", "partial_rotary_factor": float((turned < 1e20).mean())}
    wide["rope_theta"] = facts.pop("rope_theta", None) or 1e6
    near = {"rope_type": "default", "rope_theta": _key(container, "rope.freq_base_swa") or 1e4}
    facts["rope_parameters"] = {"full_attention": wide, "sliding_attention": near}
    facts["enable_moe_block"] = bool(_key(container, "expert_count"))
    facts["top_k_experts"] = _key(container, "expert_used_count")


def _mamba2(container: Container, facts: Facts) -> None:
    width, heads = (_key(container, f"ssm.{name}") for name in ("inner_size", "time_step_rank"))
    facts |= {"num_heads": heads, "head_dim": width // heads, "expand": width // facts["hidden_size"]}


def _deepseek(container: Container, facts: Facts) -> None:
    """Latent attention: the widths of heads as they are computed, not as they are cached."""
    width, turned = _key(container, "attention.key_length_mla"), _key(container, "rope.dimension_count")
    if not width or not turned:
        raise UnsupportedModel(
            f"{container.path} has latent attention in the form of before April 2025", "convert or download it again"
        )
    facts |= {"qk_nope_head_dim": width - turned, "qk_rope_head_dim": turned}
    facts["num_key_value_heads"] = facts["num_attention_heads"]
    facts["v_head_dim"] = _key(container, "attention.value_length_mla")
    facts.pop("head_dim", None)
    facts["q_lora_rank"] = _key(container, "attention.q_lora_rank")
    rope, scale = facts.get("rope_parameters"), _key(container, "rope.scaling.yarn_log_multiplier")
    if rope and scale is not None:  # ten times as much in configurations
        rope |= {"mscale": 10 * float(scale), "mscale_all_dim": 10 * float(scale)}


def _deepseek_v2(container: Container, facts: Facts) -> None:
    _deepseek(container, facts)
    grouped = (facts.get("n_group") or 1) > 1
    facts["topk_method"] = "group_limited_greedy" if grouped else "greedy"


def _gpt_oss(container: Container, facts: Facts) -> None:
    facts["intermediate_size"] = _key(container, "expert_feed_forward_length") or facts["intermediate_size"]


def _lfm2(container: Container, facts: Facts) -> None:
    heads = np.atleast_1d(container.metadata.get("lfm2.attention.head_count_kv", 0)).tolist()
    facts["layer_types"] = ["full_attention" if count else "conv" for count in heads]
    facts["num_key_value_heads"] = max(heads)
    facts["norm_eps"] = facts.pop("rms_norm_eps", 1e-5)
    facts["conv_bias"] = any(name.endswith("shortconv.conv.bias") for name in container.tensors)


def _falcon(container: Container, facts: Facts) -> None:
    groups = facts.pop("num_key_value_heads", 1)
    facts |= {"num_kv_heads": groups, "multi_query": groups == 1, "parallel_attn": True, "alibi": False}
    facts["new_decoder_architecture"] = groups > 1
    facts["num_ln_in_parallel_attn"] = 2 if "blk.0.attn_norm_2.weight" in container.tensors else 1
    facts["ffn_hidden_size"] = facts.pop("intermediate_size", None)
    facts["bias"] = "blk.0.attn_qkv.bias" in container.tensors
    facts["layer_norm_epsilon"] = _key(container, "attention.layer_norm_epsilon") or 1e-5


def _mamba(container: Container, facts: Facts) -> None:
    if _key(container, "ssm.dt_b_c_rms"):
        raise UnsupportedModel(f"{container.path} is a Falcon-Mamba, which icc does not read from GGUF")
    facts["expand"] = max(1, facts["intermediate_size"] // facts["hidden_size"])


def _partly_turned(container: Container, facts: Facts) -> None:
    """Rotary embedding of the first dimensions of a head."""
    turned = _key(container, "rope.dimension_count")
    head = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
    if turned and turned < head:
        base = facts.pop("rope_theta", None)
        rope = facts.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": base or 10000.0})
        rope["partial_rotary_factor"] = turned / head


def _long_rope(container: Container, facts: Facts) -> None:
    """Phi 3: factors of rotary frequencies for short and for long texts, and windows."""
    _partly_turned(container, facts)
    facts["sliding_window"] = facts.get("sliding_window") or None
    short, long = (_factors(container, f"rope_factors_{length}.weight") for length in ("short", "long"))
    if short is None or long is None:
        return
    rope = facts.setdefault("rope_parameters", {"rope_theta": facts.pop("rope_theta", None) or 10000.0})
    rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    original = _key(container, "rope.scaling.original_context_length") or facts["max_position_embeddings"]
    facts["original_max_position_embeddings"] = rope["original_max_position_embeddings"] = int(original)
    rope["factor"] = facts["max_position_embeddings"] / original
    if (scale := _key(container, "rope.scaling.attn_factor")) is not None:
        rope["attention_factor"] = float(scale)


def _factors(container: Container, name: str) -> list[float] | None:
    entry = container.tensors.get(name)
    if entry is None:
        return None
    if entry.kind != "f32":
        raise UnsupportedModel(f"tensor {name!r} of {container.path} is {entry.kind.upper()}", "icc reads F32 there")
    return mapped(entry.path)[entry.start : entry.end].clone().view(torch.float32).tolist()


def _layer_types(container: Container, facts: Facts) -> None:
    """Which layers have a window, where the file says so layer by layer."""
    found = _key(container, "attention.sliding_window_pattern")
    if isinstance(found, np.ndarray) and len(found) == facts["num_hidden_layers"]:
        facts["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in found]


def _command_r(container: Container, facts: Facts) -> None:
    facts["use_qk_norm"] = "blk.0.attn_q_norm.weight" in container.tensors


def _ministral3(container: Container, facts: Facts) -> None:
    """YaRN as DeepSeek has it, and scores of far positions scaled as Llama 4's."""
    rope = facts.get("rope_parameters") or {"rope_type": "default", "rope_theta": facts.pop("rope_theta", 1e6)}
    if (scale := _key(container, "rope.scaling.yarn_log_multiplier")) is not None and rope["rope_type"] == "yarn":
        rope |= {"mscale_all_dim": float(scale), "mscale": 1.0}
    original = rope.get("original_max_position_embeddings") or facts["max_position_embeddings"]
    rope |= {"llama_4_scaling_beta": _key(container, "attention.temperature_scale") or 0.0}
    facts["rope_parameters"] = rope | {"original_max_position_embeddings": original}


def _key(container: Container, key: str) -> Any:
    return container.metadata.get(f"{container.metadata['general.architecture']}.{key}")


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama"),
    "gemma": Architecture("gemma", like="gemma2"),
    "gemma2": Architecture("gemma2", adjust=_heads_of_gemma(46)),
    "gemma3": Architecture("gemma3_text", adjust=_gemma3),
    "gemma4": Architecture(
        "gemma4_text",
        names={"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"},
        adjust=_gemma4,
    ),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen3moe": Architecture("qwen3_moe"),
    "gpt-oss": Architecture("gpt_oss", turned_experts=True, adjust=_gpt_oss),
    "minimax-m2": Architecture("minimax_m2", adjust=_partly_turned),
    "phi3": Architecture("phi3", adjust=_long_rope),
    "lfm2": Architecture("lfm2", fixed={"block_auto_adjust_ff_dim": False}, adjust=_lfm2),
    "falcon": Architecture("falcon", adjust=_falcon),
    "mamba": Architecture("mamba", adjust=_mamba),
    "stablelm": Architecture("stablelm", adjust=_partly_turned),
    "nemotron": Architecture("nemotron", adjust=_partly_turned),
    "granite": Architecture("granite", _GRANITE, like="llama"),
    "granitemoe": Architecture(
        "granitemoe", _GRANITE, {"block_sparse_moe.router.weight": "ffn_gate_inp.weight"}, like="llama"
    ),
    "mamba2": Architecture("mamba2", _MAMBA2, {"mixer.dt_bias": "ssm_dt.bias"}, like="mamba", adjust=_mamba2),
    "deepseek2": Architecture(
        "deepseek_v3", _DEEPSEEK, {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}, adjust=_deepseek
    ),
    "olmo2": Architecture("olmo2"),
    "olmoe": Architecture("olmoe", fixed={"norm_topk_prob": False}),
    "command-r": Architecture("cohere", {"logit_scale": "logit_scale"}, adjust=_command_r),
    "cohere2": Architecture("cohere2", {"logit_scale": "logit_scale"}),
    "smollm3": Architecture("smollm3", like="llama"),
    "glm4": Architecture("glm4", adjust=_partly_turned),
    "exaone4": Architecture("exaone4", adjust=_layer_types),
    "seed_oss": Architecture("seed_oss", fixed={"attention_out_bias": False}),
    "mistral3": Architecture("ministral3", like="llama", adjust=_ministral3),
    "ernie4_5": Architecture("ernie4_5"),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "phi2": Architecture("phi", adjust=_partly_turned),
}


def found_architecture(container: Container, name: str) -> Architecture | None:
    """The entry of an architecture; some names stand for several model types."""
    if name == "llama" and container.get("llama.expert_count", int, 0):
        return Architecture("mixtral")
    if name == "deepseek2" and not any(tensor.endswith("exp_probs_b.bias") for tensor in container.tensors):
        if container.get("deepseek2.expert_gating_func", int, _SOFTMAX) == _SOFTMAX:
            return Architecture("deepseek_v2", _DEEPSEEK, adjust=_deepseek_v2)
    return ARCHITECTURES.get(name)
