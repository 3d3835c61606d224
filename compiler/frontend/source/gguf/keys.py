"""Keys that llama.cpp's files of all architectures have, and what transformers' configurations call them."""

from __future__ import annotations

from typing import Any

from .container import Container

Facts = dict[str, Any]

# keys of every architecture: the first of the names that the configuration has
FIELDS: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("v_head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "rope.freq_base": ("rope_theta",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size",
    ),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_weights_scale": (
        "routed_scaling_factor", "route_scale", "moe_routed_scaling_factor", "router_scaling_factor",
    ),
    "expert_weights_norm": ("norm_topk_prob", "route_norm"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "ssm.conv_kernel": ("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim"),
    "ssm.state_size": ("ssm_state_size", "mamba_d_state", "state_size", "linear_key_head_dim"),
    "ssm.group_count": ("n_groups", "mamba_n_groups", "linear_num_key_heads"),
    "ssm.time_step_rank": ("mamba_num_heads", "mamba_n_heads", "mamba_dt_rank", "linear_num_value_heads"),
    "shortconv.l_cache": ("conv_L_cache",),
}  # fmt: skip
# ends of transformers' names of a layer's parameters that the gguf package's tables lack, and the file's
NAMES = {
    "e_score_correction_bias": "exp_probs_b.bias", "expert_bias": "exp_probs_b.bias", "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a", "mixer.D": "ssm_d", "mamba.D": "ssm_d", "self_attn.sinks": "attn_sinks.weight",
}  # fmt: skip
# parameters of one number for each layer that a file has among its metadata
NUMBERS = {f"act_fn.{name}": f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}


def key(container: Container, name: str) -> Any:
    """What the file says of its own architecture, which counts as used then; None where it does not."""
    full = f"{container.metadata['general.architecture']}.{name}"
    container.used.add(full)
    return container.metadata.get(full)


def layer_count(container: Container) -> int:
    """Without the last ones that guess tokens ahead, which `weights_of` leaves out."""
    return key(container, "block_count") - (key(container, "nextn_predict_layers") or 0)
