"""Small models whose layers are of one kind or several, for test_layer_kinds.py."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import transformers

SLIDING, FULL = "sliding_attention", "full_attention"
NAMES = ["llama-one_layer", "smollm3-some_rotary"]
# larger traces, also with layers of several kinds
LARGE = """
    llama gemma3-uneven qwen3_moe-mlp_only gpt_neo-masks_in_buffers gpt2-own_scales bloom-alibi gemma2-alternating
    gemma3n-shared_kv gpt_oss-alternating qwen2-window qwen3_moe-sparse_step deepseek_v3-first_dense opt
""".split()


def configs(tiny: ModuleType) -> dict[str, tuple[Any, int]]:
    """Configurations by name, and how many of their layers need no trace."""
    t = transformers
    gqa = {k: v for k, v in tiny.GQA.items() if k != "num_hidden_layers"}
    window = {**gqa, "head_dim": 16, "sliding_window": 8}
    moe = {**gqa, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    oss = {**window, "num_local_experts": 4, "num_experts_per_tok": 2}
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
    routed = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}
    shared = {**window, "vocab_size_per_layer_input": 120, "hidden_size_per_layer_input": 8}
    gpt2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 120, "n_positions": 64}
    neo = {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "vocab_size": 120, "max_position_embeddings": 64}
    neo |= {"window_size": 6, "attention_types": [[["global", "local"], 2]]}
    return {
        "llama": (t.LlamaConfig(**gqa, num_hidden_layers=4), 3),
        "llama-one_layer": (t.LlamaConfig(**gqa, num_hidden_layers=1), 0),
        "gemma2-alternating": (t.Gemma2Config(**window, num_hidden_layers=3), 1),
        "gemma3-uneven": (
            t.Gemma3TextConfig(**window, num_hidden_layers=4, layer_types=[SLIDING, SLIDING, FULL, SLIDING]),
            2,
        ),
        "gemma3n-shared_kv": (
            t.Gemma3nTextConfig(
                **shared,
                num_hidden_layers=4,
                num_kv_shared_layers=2,
                laurel_rank=8,
                altup_num_inputs=2,
                layer_types=[SLIDING, FULL] * 2,
                activation_sparsity_pattern=[0.0] * 4,
            ),
            0,
        ),
        "gpt_oss-alternating": (t.GptOssConfig(**oss, num_hidden_layers=4, **tiny.rope("default")), 2),
        "qwen2-window": (
            t.Qwen2Config(**gqa, num_hidden_layers=4, use_sliding_window=True, sliding_window=8, max_window_layers=2),
            2,
        ),
        "qwen3_moe-mlp_only": (t.Qwen3MoeConfig(**moe, num_hidden_layers=4, mlp_only_layers=[1, 3]), 2),
        "qwen3_moe-sparse_step": (t.Qwen3MoeConfig(**moe, num_hidden_layers=4, decoder_sparse_step=3), 2),
        "deepseek_v3-first_dense": (
            t.DeepseekV3Config(
                **{**gqa, "num_key_value_heads": 4},
                **latent,
                **routed,
                num_hidden_layers=4,
                moe_intermediate_size=48,
                first_k_dense_replace=2,
            ),
            2,
        ),
        "smollm3-some_rotary": (t.SmolLM3Config(**gqa, num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0]), 2),
        "gpt2-own_scales": (t.GPT2Config(**gpt2, scale_attn_by_inverse_layer_idx=True), 0),
        "gpt_neo-masks_in_buffers": (t.GPTNeoConfig(**neo), 2),
        "bloom-alibi": (t.BloomConfig(hidden_size=60, n_layer=3, n_head=3, vocab_size=120), 2),
        "opt": (t.OPTConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, ffn_dim=96, vocab_size=120), 2),
    }
