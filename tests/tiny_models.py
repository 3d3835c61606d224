"""Tiny random checkpoints of the families that icc must compile, in the shapes that are most likely to fail.

`tiny_configs()` names each configuration `family` or `family-what_is_special`; `save_tiny` writes one as a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 120,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = {**BASE, "num_key_value_heads": 2}
# three heads of 24: hidden is not heads x head_dim, and neither is a power of two
ODD = {**BASE, "hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24}


def rope(kind: str, **options: Any) -> dict[str, Any]:
    """A `rope_parameters` entry of a configuration."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
LINEAR = rope("linear", factor=2.0)
DYNAMIC = rope("dynamic", factor=2.0)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)


def tiny_configs() -> dict[str, Any]:
    """A transformers configuration per name."""
    import transformers as t

    gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 120, "n_positions": 64}
    gpt2 |= {"bos_token_id": 1, "eos_token_id": 2}
    opt = {k: v for k, v in BASE.items() if k != "intermediate_size"} | {"ffn_dim": 96, "word_embed_proj_dim": 64}
    gemma2 = {**GQA, "head_dim": 16, "sliding_window": 8}
    moe = {**GQA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
    indexed: dict[str, Any] = {
        **BASE,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 48,
        "mlp_layer_types": ["dense", "sparse"],
        "index_head_dim": 16,
    }
    state = {**GQA, "max_position_embeddings": 256}
    routed = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
    oss = {**GQA, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    return {
        "llama": t.LlamaConfig(**GQA),
        "llama-mha": t.LlamaConfig(**BASE),
        "llama-mqa_tied_biases_llama3": t.LlamaConfig(
            **BASE, num_key_value_heads=1, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, **LLAMA3
        ),
        "llama-odd": t.LlamaConfig(**ODD),
        "llama-linear": t.LlamaConfig(**GQA, **LINEAR),
        "llama-yarn": t.LlamaConfig(**GQA, **YARN),
        "llama-dynamic": t.LlamaConfig(**GQA, **DYNAMIC),
        "mistral": t.MistralConfig(**GQA, sliding_window=8),
        "mistral-no_window_tied": t.MistralConfig(**GQA, sliding_window=None, tie_word_embeddings=True),
        "mistral-odd": t.MistralConfig(**ODD, sliding_window=5),
        "qwen2": t.Qwen2Config(**GQA),
        "qwen2-tied_yarn": t.Qwen2Config(**GQA, tie_word_embeddings=True, **YARN),
        "qwen2-window": t.Qwen2Config(**GQA, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        "qwen3": t.Qwen3Config(**GQA, head_dim=24),
        "qwen3-odd_tied_biases": t.Qwen3Config(**ODD, tie_word_embeddings=True, attention_bias=True),
        "gemma2": t.Gemma2Config(**gemma2, query_pre_attn_scalar=20),
        "gemma2-no_caps": t.Gemma2Config(**gemma2, attn_logit_softcapping=None, final_logit_softcapping=None),
        "gemma2-odd": t.Gemma2Config(**ODD, sliding_window=8),
        "gemma3": t.Gemma3TextConfig(**gemma2, layer_types=["sliding_attention", "full_attention"]),
        "gemma3-odd_untied": t.Gemma3TextConfig(**ODD, sliding_window=8, tie_word_embeddings=False),
        "phi3": t.Phi3Config(**GQA),
        "phi3-mha_partial_tied": t.Phi3Config(
            **BASE, tie_word_embeddings=True, **rope("default", partial_rotary_factor=0.5)
        ),
        "phi3-longrope": t.Phi3Config(
            **GQA,
            original_max_position_embeddings=32,
            **rope(
                "longrope",
                original_max_position_embeddings=32,
                factor=4.0,
                short_factor=[1.0 + 0.1 * i for i in range(8)],
                long_factor=[2.0 + 0.2 * i for i in range(8)],
            ),
        ),
        "gpt2": t.GPT2Config(**gpt2),
        "gpt2-untied_scaled_relu": t.GPT2Config(
            **gpt2, tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True, activation_function="relu"
        ),
        "gpt2-odd": t.GPT2Config(**{**gpt2, "n_embd": 60, "n_head": 3}),
        "gpt_neox": t.GPTNeoXConfig(**BASE, **rope("default", partial_rotary_factor=0.25)),
        "gpt_neox-sequential_full_rotary": t.GPTNeoXConfig(
            **BASE, use_parallel_residual=False, **rope("default", partial_rotary_factor=1.0)
        ),
        "gpt_neox-no_bias_tied": t.GPTNeoXConfig(**BASE, attention_bias=False, tie_word_embeddings=True),
        "opt": t.OPTConfig(**opt),
        "opt-projected_untied": t.OPTConfig(**{**opt, "word_embed_proj_dim": 32}, tie_word_embeddings=False),
        "opt-post_norm_no_bias": t.OPTConfig(**opt, do_layer_norm_before=False, enable_bias=False),
        "mixtral": t.MixtralConfig(**GQA, num_local_experts=4),
        "mixtral-top1_window": t.MixtralConfig(**GQA, num_local_experts=3, num_experts_per_tok=1, sliding_window=8),
        "mixtral-odd": t.MixtralConfig(**ODD, num_local_experts=5),
        "qwen3_moe": t.Qwen3MoeConfig(**moe),
        "qwen3_moe-mixed_renormalized": t.Qwen3MoeConfig(
            **{**moe, "decoder_sparse_step": 2}, norm_topk_prob=True, tie_word_embeddings=True
        ),
        "gpt_oss": t.GptOssConfig(**oss, **rope("default")),
        "gpt_oss-yarn_odd": t.GptOssConfig(**ODD, num_local_experts=3, num_experts_per_tok=2, sliding_window=8, **YARN),
        "bloom-alibi": t.BloomConfig(hidden_size=60, n_layer=2, n_head=3, vocab_size=120),
        "gptj-written_out_attention": t.GPTJConfig(**gpt2, rotary_dim=8),
        "falcon-written_out_mqa": t.FalconConfig(**BASE, multi_query=True, parallel_attn=True),
        "gpt_neo-local_attention": t.GPTNeoConfig(
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            vocab_size=120,
            max_position_embeddings=64,
            window_size=6,
            attention_types=[[["global", "local"], 1]],
        ),
        "cohere-interleaved_rotary": t.CohereConfig(**GQA),
        "granite-multipliers": t.GraniteConfig(
            **GQA, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=4.0, attention_multiplier=0.2
        ),
        "lfm2-short_convolutions": t.Lfm2Config(
            **{**state, "num_hidden_layers": 4},
            block_multiple_of=16,
            conv_L_cache=3,
            conv_bias=True,
            layer_types=["conv", "conv", "full_attention", "conv"],
        ),
        "qwen3_next-delta_rule": t.Qwen3NextConfig(
            **state,
            **routed,
            head_dim=16,
            num_experts=4,
            shared_expert_intermediate_size=48,
            linear_key_head_dim=16,
            linear_value_head_dim=24,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            layer_types=["linear_attention", "full_attention"],
        ),
        "kimi_linear-decay_per_row": t.KimiLinearConfig(
            **{**state, **routed, "num_key_value_heads": 4},
            linear_num_heads=2,
            linear_head_dim=24,
            q_lora_rank=None,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=12,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            layer_types=["linear_attention", "full_attention"],
        ),
        "bamba-state_space": t.BambaConfig(
            **state,
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_n_groups=2,
            mamba_d_state=24,
            mamba_chunk_size=16,
            attn_layer_indices=[1],
        ),
        "jamba-selective_scan": t.JambaConfig(
            **state,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=4,
            num_experts_per_tok=2,
            mamba_d_state=8,
            mamba_dt_rank=8,
        ),
        "recurrent_gemma-linear_recurrence": t.RecurrentGemmaConfig(
            **{**state, "num_hidden_layers": 3, "num_key_value_heads": 1},
            lru_width=64,
            head_dim=16,
            attention_window_size=8,
            block_types=["recurrent", "recurrent", "attention"],
        ),
        "rwkv-shifted_tokens": t.RwkvConfig(
            vocab_size=120,
            hidden_size=64,
            num_hidden_layers=4,
            intermediate_size=96,
            context_length=256,
            rescale_every=2,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "xlstm-matrix_memory": t.xLSTMConfig(
            vocab_size=120,
            hidden_size=64,
            num_blocks=2,
            num_hidden_layers=2,
            num_heads=4,
            chunk_size=16,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "minimax-lightning_attention": t.MiniMaxConfig(
            **state,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            block_size=8,
            layer_types=["linear_attention", "full_attention"],
        ),
        "jetmoe-experts_that_ask": t.JetMoeConfig(
            **{**BASE, "num_key_value_heads": 2},
            kv_channels=16,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        "zamba-heads_of_scans": t.ZambaConfig(
            **{**state, "num_hidden_layers": 3},
            n_mamba_heads=2,
            mamba_d_state=8,
            mamba_dt_rank=8,
            layer_types=["linear_attention", "hybrid", "hybrid"],
        ),
        "doge-bias_of_keys": t.DogeConfig(**GQA),
        **_inkling2(t),
        "xlnet-shifted_rows": t.XLNetConfig(
            vocab_size=120, d_model=64, n_layer=2, n_head=4, d_inner=96, attn_type="uni", mem_len=None
        ),
        "inkling-bias_of_queries": t.InklingTextConfig(
            **{**GQA, "head_dim": 16},
            swa_num_attention_heads=4,
            swa_num_key_value_heads=1,
            swa_head_dim=8,
            sliding_window_size=6,
            rel_extent=9,
            d_rel=4,
            log_scaling_n_floor=4,
            n_routed_experts=4,
            n_shared_experts=2,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            dense_intermediate_size=48,
            layer_types=["hybrid_sliding", "hybrid"],
            mlp_layer_types=["dense", "sparse"],
        ),
        "zaya-grouped_convolutions": t.ZayaConfig(
            **{**GQA, "head_dim": 16},
            num_experts=4,
            moe_intermediate_size=48,
        ),
        "gemma3n-sparse_activations": t.Gemma3nTextConfig(
            **{**GQA, "num_hidden_layers": 3},
            head_dim=16,
            sliding_window=8,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=120,
            laurel_rank=8,
            num_kv_shared_layers=1,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            activation_sparsity_pattern=[0.95, 0.0, 0.0],
        ),
        "llama4-chunks_and_scaled_inputs": t.Llama4TextConfig(
            **GQA,
            head_dim=16,
            intermediate_size_mlp=80,
            num_local_experts=4,
            attention_chunk_size=8,
            interleave_moe_layer_step=2,
            no_rope_layers=[1, 0],
            layer_types=["chunked_attention", "full_attention"],
        ),
        "longcat_flash-experts_that_are_the_token": t.LongcatFlashConfig(
            **{**BASE, "num_hidden_layers": 4, "head_dim": 8},
            num_layers=2,
            ffn_hidden_size=96,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=12,
            n_routed_experts=4,
            zero_expert_num=2,
            moe_topk=2,
            expert_ffn_hidden_size=48,
        ),
        "deepseek_v32-index": t.DeepseekV32Config(**indexed, index_topk=64, index_n_heads=2),
        "deepseek_v32-picked_tokens": t.DeepseekV32Config(
            **{**indexed, "max_position_embeddings": 256}, index_topk=9, index_n_heads=16
        ),
        "deepseek_v3-latent_grouped_routing": t.DeepseekV3Config(
            **BASE,
            num_key_value_heads=4,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=12,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=4,
            topk_group=2,
            moe_intermediate_size=48,
            first_k_dense_replace=1,
        ),
    }


def _inkling2(t: Any) -> dict[str, Any]:
    """Configurations by name; empty with transformers 5.17, which the GPU machine has."""
    if not hasattr(t, "Inkling2TextConfig"):
        return {}
    config = t.Inkling2TextConfig(
        **{**GQA, "head_dim": 16},
        swa_num_attention_heads=4,
        swa_num_key_value_heads=1,
        swa_head_dim=8,
        sliding_window_size=6,
        rel_extent=9,
        d_rel=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        n_layers_per_attn_res_block=1,
        layer_types=["hybrid_sliding", "hybrid"],
    )
    return {"inkling2-windows_of_taps": config}


def save_tiny(config: Any, path: Path, dtype: str = "float32", seed: int = 0, max_shard_size: str = "5GB") -> Any:
    """Write a random checkpoint of `config`; returns its float32 model with eager attention, the oracle.

    The oracle's weights are those stored, rounded to `dtype`; norms and biases are perturbed so that each one matters.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    stored = getattr(torch, dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(stored)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


def reference_logits(model: Any, ids: list[int]) -> Any:
    """transformers' logits [T, vocab] in float32."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
