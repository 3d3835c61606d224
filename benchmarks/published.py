"""Configurations of published checkpoints, for types whose configuration class does not default to a checkpoint's.

Each has the layer pattern and the kinds of attention and routing from the config.json of the checkpoint named beside
it; widths and counts are shrunk as for all types. "exactly": small values that shrinking keeps, because sizes depend on
each other.
"""

from __future__ import annotations

from typing import Any

_CONV2 = ["conv", "conv", "full_attention"]

_INDEXER = {
    "exactly": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 512,
        "indexer_compress_ratio": 4,
    }
}
_SLIDING = {
    "exactly": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "head_dim": 24,
        "qk_nope_head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    }
}

PUBLISHED: dict[str, dict[str, Any]] = {
    # microsoft/deberta-v3-base
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 256,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "max_relative_positions": -1,
        "type_vocab_size": 0,
    },
    # microsoft/deberta-base
    "deberta": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_biased_input": False,
        "max_relative_positions": -1,
        "type_vocab_size": 0,
    },
    # LiquidAI/LFM2-1.2B
    "lfm2": {
        "num_hidden_layers": 16,
        "layer_types": [*_CONV2 * 3, *["conv", "full_attention"] * 3, "conv"],
    },
    # LiquidAI/LFM2-8B-A1B
    "lfm2_moe": {
        "num_hidden_layers": 12,
        "layer_types": [*_CONV2, *["conv", "conv", "conv", "full_attention"] * 2, "conv"],
    },
    # ibm-ai-platform/Bamba-9B
    "bamba": {"num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27]},
    # ibm-granite/granite-4.0-h-small
    "granitemoehybrid": {
        "num_hidden_layers": 40,
        "layer_types": [*["mamba"] * 5, "attention", *[*["mamba"] * 9, "attention"] * 3, *["mamba"] * 4],
    },
    # deepseek-ai/DeepSeek-V2
    "deepseek_v2": {
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "num_experts_per_tok": 6,
    },
    # rednote-hilab/dots.llm1.inst
    "dots1": {"first_k_dense_replace": 1, "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    # databricks/dbrx-instruct
    "dbrx": {
        "exactly": {
            "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 500000.0},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        }
    },
    # FacebookAI/xlm-clm-enfr-1024
    "xlm": {"causal": True},
    # facebook/xmod-base
    "xmod": {"default_language": "en_XX"},
    # no checkpoint is published; the class needs these sizes and has no defaults for them
    "cohere_compass_text": {
        "exactly": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}}
    },
    "qwen4_exp_text": _INDEXER,
    "qwen4_exp": {"exactly": {"text_config": _INDEXER["exactly"]}},
    "dots3_note_text": _SLIDING,
    "dots3_note": {"exactly": {"text_config": _SLIDING["exactly"]}},
    "blt": {"exactly": {"encoder_hash_byte_group_vocab": 200}},
    "reformer": {"exactly": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 16]}},
}
