"""Tiny configurations of any transformers model type, chosen by what its attributes are called.

There is no table of families: a configuration class is built with its defaults, every size that it turns out to have
is replaced by a tiny one, and a few profiles (other head counts, other widths) are tried where the class refuses the
first.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

_LAYERS = 2
_POSITIONS = 128
_VOCAB = 160

# what a size is called -> tiny value
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "emb_dim", "model_dim"), 64),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "input_embedding_size", "output_embedding_size"), 64),
    **dict.fromkeys(("attention_hidden_size", "lru_width", "d_embed", "embed_size", "cross_attention_hidden_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), _LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_encoder_layers", "num_blocks"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("attention_heads", "mamba_n_heads", "num_global_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("num_global_key_value_heads", "swa_num_key_value_heads", "cca_num_k_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "v_head_dim", "d_kv", "d_head", "kv_channels", "dim_head"), 16),
    **dict.fromkeys(("global_head_dim", "attention_head_size", "attention_key_value_head_size", "attn_head_dim"), 16),
    **dict.fromkeys(
        ("swa_head_dim", "swa_v_head_dim", "query_pre_attn_scalar", "index_head_dim", "qk_nope_head_dim"), 16
    ),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "hidden_size_per_layer_input", "moe_latent_size"), 8),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "d_inner", "dim_ff", "dff", "ffn_hidden_size", "d_ff"), 96
    ),
    **dict.fromkeys(
        ("decoder_ffn_dim", "encoder_ffn_dim", "feed_forward_size", "intermediate_size_mlp", "ffn_size"), 96
    ),
    **dict.fromkeys(("feed_forward_proj_dim", "block_ff_dim", "block_dim", "dense_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size", "expert_dim"), 48),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("linear_num_key_heads", "mamba_num_heads", "mamba_n_groups", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"), 4
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(("num_selected_experts", "num_experts_per_topk", "moe_num_active_primary_experts"), 2),
    **dict.fromkeys(("n_group", "num_expert_group", "num_expert_groups"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "zero_expert_num"), 1),
    **dict.fromkeys(("q_lora_rank",), 24),
    **dict.fromkeys(("kv_lora_rank", "index_n_heads"), 16),
    **dict.fromkeys(("index_topk",), 512),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), _VOCAB),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len"), _POSITIONS
    ),
    **dict.fromkeys(
        ("original_max_position_embeddings", "max_target_positions", "seq_length", "max_seq_length"), _POSITIONS
    ),
    **dict.fromkeys(("sliding_window", "window_size", "sliding_window_size", "local_attention", "swa_window_size"), 8),
    **dict.fromkeys(("attention_chunk_size", "attention_window_size"), 8),
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern", "layers_block_type_period"), 2),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), 2),
    **dict.fromkeys(("num_kv_shared_layers",), 2),
    **dict.fromkeys(("is_decoder",), True),
    **dict.fromkeys(("expert_layer_period", "attn_layer_period", "decoder_sparse_step", "layer_period"), 2),
    **dict.fromkeys(("expert_layer_offset", "attn_layer_offset"), 1),
}
_UNSET = "also sizes that are None"
# tried one after the other until a model can be built; each is laid over _SIZES
_PROFILES: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4, "num_kv_heads": 4, "n_head_kv": 4},
    {"num_key_value_heads": 4, "head_dim": 8},  # latent attention, where head_dim is the size of the rotary part
    {"num_key_value_heads": 4, "head_dim": 8, _UNSET: True},
    {"num_hidden_layers": 4, "n_layer": 4, "num_layers": 4},
    {"head_dim": None, "num_key_value_heads": None},
    {"n_group": 1, "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8},
    # state spaces: heads times their size is twice the hidden size
    {
        **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"), 8),
        **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
        **dict.fromkeys(("mamba_headdim", "head_dim", "mamba_d_head"), 16),
        **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
        **{"mamba_d_ssm": 128, "attention_head_dim": 32, "attention_hidden_size": 128},
    },
    {"hidden_size": 128, "n_embd": 128, "d_model": 128},
)
# the kinds of layers in the published checkpoints of types whose classes default to one kind
_PUBLISHED: dict[str, dict[str, Any]] = {
    **{name: {"layer_types": ["conv", "full_attention"]} for name in ("lfm2", "lfm2_moe", "lfm3")},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
}
_PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers", "attention_layers", "moe_layers")


def tiny_configs(model_type: str) -> Iterator[Any]:
    """Tiny configurations of `model_type`, most ordinary first; classes that refuse a profile are skipped."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    last: Exception | None = None
    made = 0
    for profile in _PROFILES:
        for drop in (set(), set(_PER_LAYER)):
            try:
                yield _build(cls, {**_SIZES, **profile}, drop)
                made += 1
                break
            except Exception as error:
                last = error
    if not made and last is not None:
        raise last


def _build(cls: type, sizes: dict[str, Any], drop: set[str]) -> Any:
    default = cls()
    kwargs = _overrides(default, sizes, drop)
    published = _PUBLISHED.get(getattr(cls, "model_type", ""), {})
    if "layer_types" in published:
        layers = kwargs.get("num_hidden_layers", _LAYERS)
        published = {"layer_types": (published["layer_types"] * layers)[:layers]}
    return cls(**{**kwargs, **published})


def _overrides(config: Any, sizes: dict[str, Any], drop: set[str]) -> dict[str, Any]:
    """Keyword arguments that make `config`'s class tiny, read off an instance with default values."""
    from transformers import PretrainedConfig

    known = _names(config)
    out: dict[str, Any] = {}
    for name in known:
        value = _attribute(config, name)
        if isinstance(value, PretrainedConfig):
            out[name] = _overrides(value, sizes, drop)
        elif name in sizes and not isinstance(value, (dict, list)):
            if value is None and not (_UNSET in sizes or _wanted_when_unset(name)):
                continue
            out[name] = sizes[name]
    if "num_kv_shared_layers" in out:
        out["num_hidden_layers"] = 2 * _LAYERS
    layers = next((out[n] for n in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if n in out), _LAYERS)
    for name in _PER_LAYER:
        value = _attribute(config, name) if name in known else None
        if isinstance(value, list) and value and name not in drop:
            out[name] = _sample(value, layers)
    out.update(_rope(config, known))
    return {k: v for k, v in out.items() if v is not None}


def _names(config: Any) -> list[str]:
    """Attributes that the constructor takes: its own fields and those of its mapping."""
    found = {n for c in type(config).__mro__ for n in getattr(c, "__annotations__", {})}
    found |= set(inspect.signature(type(config).__init__).parameters) | set(vars(config))
    return sorted(n for n in found if not n.startswith("__") and n != "self")


def _attribute(config: Any, name: str) -> Any:
    """A value of the config; None where it has one for each layer."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def _wanted_when_unset(name: str) -> bool:
    """Sizes whose default None means "derived from others": left alone unless they name tokens or heads."""
    return name.endswith("_token_id") or name == "head_dim"


def _sample(values: list[Any], count: int) -> list[Any]:
    """`count` entries of a per-layer list, with each distinct value if there is room."""
    distinct = list(dict.fromkeys(map(str, values)))
    first = [values[[str(v) for v in values].index(d)] for d in distinct]
    return (first * count)[:count] if len(distinct) > 1 else values[:1] * count


def _rope(config: Any, known: list[str]) -> dict[str, Any]:
    if "rope_parameters" not in known:
        return {}
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return {}

    def shrink(entry: dict[str, Any]) -> dict[str, Any]:
        kept = dict(entry)
        if "original_max_position_embeddings" in kept:
            kept["original_max_position_embeddings"] = _POSITIONS // 2
        for section in ("mrope_section",):
            if section in kept:
                kept[section] = [2, 3, 3]
        for factors in ("short_factor", "long_factor"):
            if factors in kept:
                kept[factors] = [1.0 + 0.1 * i for i in range(8)]
        return kept

    nested = any(isinstance(v, dict) for v in rope.values())
    return {
        "rope_parameters": {k: shrink(v) if isinstance(v, dict) else v for k, v in rope.items()}
        if nested
        else shrink(rope)
    }
