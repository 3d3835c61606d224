"""Tiny models of the architectures that `gguf_architectures.py` compares: transformers' classes and their sizes."""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 120,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GQA = {**BASE, "num_key_value_heads": 2}
WINDOW = {**GQA, "head_dim": 16, "sliding_window": 8}
MOE = {**GQA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    **BASE, "num_key_value_heads": 4, "moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12,
}  # fmt: skip
SCALES = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0, "attention_multiplier": 0.25,
}  # fmt: skip


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


HALF = rope("default", partial_rotary_factor=0.5)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
LONG = rope(
    "longrope", original_max_position_embeddings=32, factor=4.0, short_factor=[1.0 + 0.1 * i for i in range(8)],
    long_factor=[2.0 + 0.2 * i for i in range(8)],
)  # fmt: skip
FAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
# by name: transformers' class, its arguments, and keys that the converter needs but transformers 5 no longer writes
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaConfig", GQA, {}),
    "llama-tied-llama3": ("LlamaConfig", {**GQA, **LLAMA3, "tie_word_embeddings": True}, {}),
    "llama-linear": ("LlamaConfig", {**GQA, **rope("linear", factor=2.0)}, {}),
    "llama-yarn": ("LlamaConfig", {**GQA, **YARN}, {}),
    "mistral": ("MistralConfig", {**GQA, "head_dim": 24, "sliding_window": None}, {}),
    "mixtral": ("MixtralConfig", {**GQA, "num_local_experts": 4}, {}),
    "ministral3": ("Ministral3Config", {**GQA, "head_dim": 16}, {}),
    "qwen2": ("Qwen2Config", GQA, {}),
    "qwen2-yarn": ("Qwen2Config", {**GQA, **YARN}, {}),
    "qwen2moe": ("Qwen2MoeConfig", {**MOE, "shared_expert_intermediate_size": 80}, {}),
    "qwen3": ("Qwen3Config", {**GQA, "head_dim": 24}, {}),
    "qwen3moe": ("Qwen3MoeConfig", {**MOE, "head_dim": 24, "norm_topk_prob": True}, {}),
    "gemma": ("GemmaConfig", {**GQA, "head_dim": 16}, {}),
    "gemma2": ("Gemma2Config", {**WINDOW, "query_pre_attn_scalar": 16}, {}),
    "gemma3": ("Gemma3TextConfig", {**WINDOW, "num_hidden_layers": 7, "query_pre_attn_scalar": 16}, {}),
    "gemma3-linear": (
        "Gemma3TextConfig",
        {**WINDOW, "num_hidden_layers": 7, "query_pre_attn_scalar": 16, "rope_parameters": FAR},
        {},
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {**WINDOW, "num_hidden_layers": 12, "global_head_dim": 32, "hidden_size_per_layer_input": 8,
         "vocab_size_per_layer_input": 120, "num_kv_shared_layers": 6, "use_double_wide_mlp": True}, {},
    ),
    "gemma4-moe": (
        "Gemma4TextConfig",
        {**WINDOW, "num_hidden_layers": 6, "global_head_dim": 32, "hidden_size_per_layer_input": 0,
         "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48,
         "num_global_key_value_heads": 1, "attention_k_eq_v": True}, {},
    ),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 120, "n_positions": 64,
                            "bos_token_id": 1, "eos_token_id": 2}, {"n_ctx": 64}),
    "phi2": ("PhiConfig", {**BASE, **HALF, "intermediate_size": 256, "num_key_value_heads": 4}, {}),
    "phi3": ("Phi3Config", GQA, {}),
    "phi3-window": ("Phi3Config", {**GQA, "sliding_window": 8}, {}),
    "phi3-longrope": ("Phi3Config", {**GQA, **LONG, "original_max_position_embeddings": 32}, {}),
    "stablelm": ("StableLmConfig", {**GQA, **rope("default", partial_rotary_factor=0.25)}, {}),
    "stablelm-parallel": ("StableLmConfig", {**GQA, **HALF, "use_qkv_bias": True, "use_parallel_residual": True}, {}),
    "starcoder2": ("Starcoder2Config", {**GQA, "use_bias": True}, {}),
    "falcon": (
        "FalconConfig",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 120, "multi_query": True,
         "parallel_attn": True, "new_decoder_architecture": False, "bos_token_id": 1, "eos_token_id": 2},
        {"num_kv_heads": 1},
    ),
    "falcon-new": (
        "FalconConfig",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": 120,
         "new_decoder_architecture": True, "bos_token_id": 1, "eos_token_id": 2}, {},
    ),
    "bloom": ("BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 120}, {}),
    "nemotron": ("NemotronConfig", {**GQA, **HALF, "head_dim": 16}, {}),
    "gpt-oss": (
        "GptOssConfig",
        {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
         **rope("yarn", factor=4.0, original_max_position_embeddings=32, truncate=False)}, {},
    ),
    "lfm2": ("Lfm2Config", {**GQA, "num_hidden_layers": 4, "block_multiple_of": 16,
                            "layer_types": ["conv", "conv", "full_attention", "conv"]}, {}),
    "mamba": ("MambaConfig", {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 120, "bos_token_id": 1,
                              "eos_token_id": 2, "pad_token_id": 0}, {}),
    "mamba2": ("Mamba2Config", {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 120, "state_size": 16,
                                "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16, "bos_token_id": 1,
                                "eos_token_id": 2, "pad_token_id": 0}, {}),
    "minimax-m2": (
        "MiniMaxM2Config",
        {**GQA, **HALF, "intermediate_size": 48, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"rotary_dim": 8},
    ),
    "granite": ("GraniteConfig", {**GQA, **SCALES}, {}),
    "granitemoe": ("GraniteMoeConfig", {**GQA, **SCALES, "num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "olmo2": ("Olmo2Config", GQA, {}),
    "olmoe": ("OlmoeConfig", {**GQA, "num_experts": 4, "num_experts_per_tok": 2}, {}),
    "cohere": ("CohereConfig", GQA, {}),
    "cohere2": ("Cohere2Config", {**GQA, "sliding_window": 8}, {"rotary_pct": 1.0}),
    "smollm3": ("SmolLM3Config", {**GQA, "num_hidden_layers": 4}, {}),
    "glm4": ("Glm4Config", {**GQA, **HALF, "head_dim": 16}, {}),
    "deepseek2-v2": (
        "DeepseekV2Config",
        {**LATENT, "q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.0, "norm_topk_prob": False},
        {},
    ),
    "deepseek2-v3": ("DeepseekV3Config", {**LATENT, "q_lora_rank": 24, "n_group": 2, "topk_group": 1}, {}),
    "exaone4": ("Exaone4Config", {**GQA, "num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 4}, {}),
    "seed_oss": ("SeedOssConfig", {**GQA, "head_dim": 16}, {}),
    "ernie4_5": ("Ernie4_5Config", {**GQA, "head_dim": 16}, {}),
    "hunyuan-dense": ("HunYuanDenseV1Config", {**GQA, "head_dim": 16}, {}),
}  # fmt: skip
