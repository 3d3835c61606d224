"""More tiny models for `gguf_architectures.py`: values other than their types' defaults, which the file must hold."""

from __future__ import annotations

from typing import Any

from gguf_hybrid_shapes import SIG
from gguf_shapes import BASE, GQA, LATENT, LLAMA3, LONG, WINDOW, YARN, rope

NEAR = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]
FAR_YARN = {
    "rope_type": "yarn", "rope_theta": 70000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
TWO = {
    "rope_parameters": {
        "full_attention": FAR_YARN,
        "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 1.0},
    }
}
HERE = {"rope_type": "default", "rope_theta": 10000.0}
BASES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 70000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
    }
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "laguna-windows": (
        "LagunaConfig",
        {**SIG, **TWO, "num_hidden_layers": 8, "layer_types": NEAR * 2, "num_experts": 4, "sliding_window": 8,
         "num_attention_heads_per_layer": [4, 2, 2, 2] * 2, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6,
         "moe_routed_scaling_factor": 1.7, "shared_expert_intermediate_size": 80},
        {},
    ),
    "laguna-elements": (
        "LagunaConfig",
        {**SIG, "num_hidden_layers": 2, "num_experts": 4, "gating": "per-element", "sliding_window": 8,
         "shared_expert_intermediate_size": 80},
        {"sliding_window": 0},
    ),
    "mellum-bases": (
        "MellumConfig",
        {**SIG, **BASES, "num_hidden_layers": 4, "num_experts": 4, "sliding_window": 8,
         "layer_types": ["sliding_attention", "full_attention"] * 2}, {},
    ),
    "hy_v3-scaled": (
        "HYV3Config",
        {**SIG, "num_hidden_layers": 3, "num_experts": 4, "router_scaling_factor": 1.3}, {},
    ),
    "olmo3-yarn": (
        "Olmo3Config",
        {**GQA, "num_hidden_layers": 4, "sliding_window": 8,
         "rope_parameters": {"full_attention": YARN["rope_parameters"], "sliding_attention": HERE}}, {},
    ),
    "exaone4-all": (
        "Exaone4Config",
        {**GQA, "num_hidden_layers": 4, "sliding_window": None, "layer_types": ["full_attention"] * 4}, {},
    ),
    "minicpm3-longrope": (
        "MiniCPM3Config",
        {**BASE, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 16,
         "qk_nope_head_dim": 16, "v_head_dim": 12,
         "rope_parameters": {**LONG["rope_parameters"], "original_max_position_embeddings": 128, "factor": 1.0}},
        {},
    ),
    "deepseek2-v3-plain": (
        "DeepseekV3Config",
        {**LATENT, "q_lora_rank": 24, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
         "routed_scaling_factor": 1.0}, {},
    ),
    "deepseek2-v3-yarn": (
        "DeepseekV3Config",
        {**LATENT, "q_lora_rank": 24, "n_group": 1, "topk_group": 1,
         "rope_parameters": {**YARN["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 1.0}}, {},
    ),
    "qwen3moe-plain": (
        "Qwen3MoeConfig",
        {**GQA, "head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
         "norm_topk_prob": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}, {},
    ),
    "gemma2-plain": (
        "Gemma2Config",
        {**WINDOW, "query_pre_attn_scalar": 16, "sliding_window": 5, "attn_logit_softcapping": 3.0,
         "final_logit_softcapping": 2.0}, {},
    ),
    "cohere2-plain": (
        "Cohere2Config", {**GQA, "num_hidden_layers": 8, "sliding_window": 5, "logit_scale": 0.3}, {"rotary_pct": 1.0}
    ),
    "gpt-oss-plain": (
        "GptOssConfig",
        {**WINDOW, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2,
         **{"rope_parameters": {"rope_type": "yarn", "rope_theta": 20000.0, "factor": 8.0, "beta_fast": 16.0,
                                "beta_slow": 2.0, "original_max_position_embeddings": 64, "truncate": False}}}, {},
    ),
    "afmoe-bases": (
        "AfmoeConfig",
        {**SIG, "num_hidden_layers": 8, "num_experts": 4, "num_shared_experts": 2, "num_dense_layers": 2,
         "sliding_window": 5, "route_scale": 1.9, "global_attn_every_n_layers": 4, "mup_enabled": True}, {},
    ),
    "exaone-moe-windows": (
        "ExaoneMoeConfig",
        {**SIG, "num_hidden_layers": 8, "num_experts": 4, "num_shared_experts": 2, "first_k_dense_replace": 2,
         "sliding_window": 5, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5}, {},
    ),
    "ernie4_5-moe-steps": (
        "Ernie4_5_MoeConfig",
        {**GQA, "num_hidden_layers": 6, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48,
         "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_interval": 2}, {},
    ),
    "qwen3next-steps": (
        "Qwen3NextConfig",
        {**GQA, "num_hidden_layers": 6, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 16, "linear_value_head_dim": 16, "full_attention_interval": 3, "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80},
        {"full_attention_interval": 3},
    ),
    "granite_swa-windows": (
        "GraniteSWAConfig", {**GQA, "num_hidden_layers": 6, "sliding_window": 5, "attention_multiplier": 0.3}, {}
    ),
    "hunyuan-dense-alpha": (
        "HunYuanDenseV1Config",
        {**GQA, "head_dim": 128, "max_position_embeddings": 262144, **rope("dynamic", alpha=1000.0, factor=1.0)}, {},
    ),
    "exaone4-llama3": (
        "Exaone4Config", {**GQA, **LLAMA3, "num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 4}, {}
    ),
    "phi3-partial": (
        "Phi3Config",
        {**GQA, **rope("longrope", original_max_position_embeddings=32, factor=4.0, partial_rotary_factor=0.75,
                       short_factor=[1.0 + 0.1 * i for i in range(6)], long_factor=[2.0 + 0.2 * i for i in range(6)]),
         "original_max_position_embeddings": 32}, {},
    ),
    "falcon-h1-norm": (
        "FalconH1Config",
        {**GQA, "head_dim": 16, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2,
         "mamba_d_state": 16, "mamba_chunk_size": 16, "mamba_rms_norm": True, "mamba_norm_before_gate": False}, {},
    ),
    "olmo2-yarn": ("Olmo2Config", {**GQA, **YARN}, {}),
    "seed_oss-bias": (
        "SeedOssConfig", {**GQA, "head_dim": 16, "attention_bias": True, "attention_out_bias": False}, {}
    ),
    "phimoe": (
        "PhimoeConfig", {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
                         **rope("default"), "attention_bias": True, "lm_head_bias": True},
        {"architectures": ["PhiMoEForCausalLM"], "original_max_position_embeddings": 128},
    ),
    "phimoe-longrope": (
        "PhimoeConfig",
        {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
         "original_max_position_embeddings": 32,
         "rope_parameters": {**LONG["rope_parameters"], "short_mscale": 1.18321596, "long_mscale": 1.18321596}},
        {"architectures": ["PhiMoEForCausalLM"]},
    ),
    "glm4moe-plain": (
        "Glm4MoeConfig",
        {**SIG, "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 2, "num_hidden_layers": 4,
         "n_group": 1, "topk_group": 1, "use_qk_norm": False, "routed_scaling_factor": 1.6, "norm_topk_prob": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.25}}, {},
    ),
}  # fmt: skip
READS = {**BASE, "max_position_embeddings": 66, "type_vocab_size": 2}
ENCODERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bert": ("BertConfig", READS, {}),
    "roberta": ("RobertaConfig", {**READS, "type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0}, {}),
    "distilbert": (
        "DistilBertConfig",
        {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "vocab_size": 120,
         "max_position_embeddings": 64}, {},
    ),
    "modern-bert": (
        "ModernBertConfig",
        {**BASE, "num_hidden_layers": 4, "local_attention": 8, "global_attn_every_n_layers": 3,
         "cls_token_id": 1, "sep_token_id": 2},
        {"global_attn_every_n_layers": 3, "local_attention": 8, "global_rope_theta": 160000.0,
         "local_rope_theta": 10000.0},
    ),
}  # fmt: skip
