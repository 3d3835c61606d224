"""Tiny configurations of any transformers model type, with the pattern of layers of its published default.

There is no table of families: a configuration class is built with its defaults, which are those of a published
checkpoint. Widths and counts are replaced by tiny ones, chosen by their names; the kinds of layers, of attention and of
routing stay, and enough layers are kept to have each kind twice. A few profiles (other head counts, other widths) are
tried if the class refuses the first.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from published import PUBLISHED

_LAYERS = 2
_MOST_LAYERS = 20
_POSITIONS = 128
_VOCAB = 160
_HEADS = 4

_LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "decoder_layers",
    "encoder_layers",
    "num_encoder_layers",
    "num_blocks",
)
# name of a size -> tiny value
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "emb_dim", "model_dim"), 64),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "input_embedding_size", "output_embedding_size"), 64),
    **dict.fromkeys(("lru_width", "d_embed", "embed_size", "cross_attention_hidden_size", "backbone_hidden_size"), 64),
    **dict.fromkeys(("hidden_size_global", "adapter_input_size", "adapter_in_dim", "adapter_out_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), _HEADS),
    **dict.fromkeys(("attention_heads", "num_global_attention_heads", "swa_num_attention_heads"), _HEADS),
    **dict.fromkeys(("head_dim", "attention_head_dim", "v_head_dim", "d_kv", "d_head", "kv_channels", "dim_head"), 16),
    **dict.fromkeys(("global_head_dim", "attention_head_size", "attention_key_value_head_size", "attn_head_dim"), 16),
    **dict.fromkeys(("swa_head_dim", "swa_v_head_dim", "query_pre_attn_scalar", "index_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "d_rel"), 16),
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
    **dict.fromkeys(("shared_experts_intermediate_size",), 48),
    # state spaces: heads times head size is twice the hidden size
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim", "mamba_d_state", "state_size"), 16),
    **dict.fromkeys(("ssm_state_size",), 16),
    **dict.fromkeys(("mamba_d_ssm", "attention_hidden_size"), 128),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 2),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "adapter_rank", "laurel_rank"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"), 4
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(("num_selected_experts", "num_experts_per_topk", "moe_num_active_primary_experts"), 2),
    **dict.fromkeys(("n_group", "num_expert_group", "num_expert_groups"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("zero_expert_num",), 1),
    **dict.fromkeys(("q_lora_rank",), 24),
    **dict.fromkeys(("kv_lora_rank", "o_lora_rank", "q_b_lora_rank"), 16),
    **dict.fromkeys(("index_n_heads",), 4),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "entity_vocab_size"), _VOCAB),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len"), _POSITIONS
    ),
    **dict.fromkeys(
        ("original_max_position_embeddings", "max_target_positions", "seq_length", "max_seq_length"), _POSITIONS
    ),
    **dict.fromkeys(("sliding_window", "window_size", "sliding_window_size", "local_attention", "swa_window_size"), 8),
    **dict.fromkeys(("attention_chunk_size", "attention_window_size"), 8),
}
_KV_HEADS = {
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("num_global_key_value_heads", "swa_num_key_value_heads", "cca_num_k_heads"), 2),
}
_TOKEN_IDS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
}
# sizes that classes need but have no default for: set in a later profile
_NEEDED = ("head_dim", *_KV_HEADS, "num_experts_per_tok", "n_routed_experts", "n_shared_experts")
_UNSET = "also these where they are None"
# each is tried over the sizes, until a model can be built
_PROFILES: tuple[dict[str, Any], ...] = (
    {},
    {_UNSET: True},
    dict.fromkeys(_KV_HEADS, 4),
    {**dict.fromkeys(_KV_HEADS, 4), "head_dim": 8},  # latent attention whose head_dim is the size of the rotary part
    {**dict.fromkeys(_KV_HEADS, 4), "head_dim": 8, _UNSET: True},
    {"head_dim": None, "num_key_value_heads": None},
    {"n_group": 1, "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8},
    {"num_heads": 8, "head_dim": 16},
    {"hidden_size": 128, "n_embd": 128, "d_model": 128},
)
# fields with the number of special first layers, and with the period of others: at least so many layers are kept
_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_PERIODS = ("attn_layer_period", "expert_layer_period", "decoder_sparse_step", "moe_layer_interval", "layer_group_size")
_SHARED = "num_kv_shared_layers"


def tiny_configs(model_type: str, decoder: bool = True) -> Iterator[Any]:
    """Yield tiny configurations of `model_type`, the most ordinary first, without profiles that its class refuses.

    decoder: types that can be encoders or decoders become decoders. Raises the first error if all profiles are refused.
    """
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    published = PUBLISHED.get(model_type, {})
    last: Exception | None = None
    made = 0
    for profile in _PROFILES:
        try:
            yield _build(cls, profile, published, decoder)
            made += 1
        except Exception as error:
            last = last or error
    if not made and last is not None:
        raise last


def pattern_of(config: Any) -> str:
    """The kinds of layers of a configuration with their counts, as text."""
    text = config.get_text_config(decoder=True)
    lists = _per_layer(text, _count(text))
    kinds = [value for name, value in lists.items() if name in ("layer_types", "layers_block_type", "mlp_layer_types")]
    if not kinds:
        return f"{_count(text)} layers"
    rows = ["+".join(map(str, row)) for row in zip(*kinds, strict=True)]
    return ", ".join(f"{rows.count(row)} {row}" for row in dict.fromkeys(rows)).replace("_attention", "")


def tiny_options(model_type: str) -> tuple[Any, list[dict[str, Any]]]:
    """The configuration class of a decoder type, and the keyword arguments of the tiny ones that it accepts."""
    from transformers import CONFIG_MAPPING

    cls, found = CONFIG_MAPPING[model_type], []
    for profile in _PROFILES:
        with contextlib.suppress(Exception):  # the class may refuse it with any error
            options = _options(cls, profile, PUBLISHED.get(model_type, {}), True)
            cls(**options)
            found.append(options)
    return cls, found


def _build(cls: type, profile: dict[str, Any], published: dict[str, Any], decoder: bool) -> Any:
    return cls(**_options(cls, profile, published, decoder))


def _options(cls: type, profile: dict[str, Any], published: dict[str, Any], decoder: bool) -> dict[str, Any]:
    shrink_not = published.get("exactly", {})
    published = {name: value for name, value in published.items() if name != "exactly"}
    default = cls(**published)
    made: dict[str, Any] = {"is_decoder": True} if decoder and "is_decoder" in _names(default) else {}
    if decoder and getattr(default, "attn_type", None) == "bi":  # XLNet's field for that
        made["attn_type"] = "uni"
    return {**_joined(_overrides(default, profile, published), shrink_not), **made}


def _joined(options: dict[str, Any], exactly: dict[str, Any]) -> dict[str, Any]:
    """Options updated by `exactly`, also inside nested dicts."""
    nested = {k: _joined(options[k], v) for k, v in exactly.items() if isinstance(v, dict) and k in options}
    return {**options, **exactly, **nested}


def _overrides(config: Any, profile: dict[str, Any], given: dict[str, Any], whole: bool = True) -> dict[str, Any]:
    """Keyword arguments that make `config`'s class tiny, derived from an instance with default values.

    whole: keep its pattern of layers, as for the text model.
    """
    from transformers import PretrainedConfig

    known = _names(config)
    published = _count(config)
    text = config.get_text_config(decoder=True)
    layers = _kept(config, published) if whole else min(published, _LAYERS)
    lists = _per_layer(config, published)
    out: dict[str, Any] = dict(given)
    for name in known:
        value = _attribute(config, name)
        if isinstance(value, PretrainedConfig):
            out[name] = _overrides(value, profile, {}, value is text)
        elif name in lists:
            out[name] = [_tiny(name.removesuffix("_per_layer"), v, config, profile) for v in value[:layers]]
        elif _is_places(name, value, published):
            out[name] = [place for place in value if place < layers]
        elif name in _LAYER_COUNTS and isinstance(value, int):
            out[name] = min(value, layers)
        elif name == _SHARED and value:
            out[name] = _shared(config)
        elif not isinstance(value, (dict, list, bool)):
            tiny = _tiny(name, value, config, profile)
            if tiny is not value:
                out[name] = tiny
    out.update(_rope(config, known))
    return {k: v for k, v in out.items() if v is not None}


def _tiny(name: str, value: Any, config: Any, profile: dict[str, Any]) -> Any:
    """The tiny value of an attribute; `value` itself if it is no size or is smaller already."""
    if value is None:
        wanted = _UNSET in profile and name in _NEEDED
        return {**_SIZES, **_KV_HEADS, **profile}[name] if wanted or name in profile else None
    if name in profile and not isinstance(value, (str, bool)):
        return profile[name]
    if name in _TOKEN_IDS:
        return _TOKEN_IDS[name]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name in _KV_HEADS:  # keep the kind: one, as many as query heads, or groups
        heads = _attribute(config, "num_attention_heads") or _attribute(config, "n_head")
        return value if value <= 1 else _HEADS if value == heads else _KV_HEADS[name]
    return min(value, _SIZES[name]) if name in _SIZES else value


def _count(config: Any) -> int:
    """The number of layers of a configuration."""
    found = (_attribute(config, name) for name in _LAYER_COUNTS)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), _LAYERS)


def _per_layer(config: Any, layers: int) -> dict[str, list[Any]]:
    """The lists with one value for each layer, by name."""
    found = {name: _attribute(config, name) for name in _names(config)}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, list) and len(value) == layers > 1 and not _is_places(name, value, layers)
    }


def _is_places(name: str, value: Any, layers: int) -> bool:
    """Whether a list has indices of layers."""
    if not isinstance(value, list) or not value or not all(type(v) is int for v in value):
        return False
    return value == sorted(set(value)) and value[-1] < layers and len(value) > 1 and "token" not in name


def _kept(config: Any, layers: int) -> int:
    """How many layers have each kind of layer twice, or once if twice takes too many; ValueError if once does, too."""
    lists = _per_layer(config, layers)
    places = [set(v) for n in _names(config) if _is_places(n, v := _attribute(config, n), layers)]
    rows = [(*(str(v[i]) for v in lists.values()), *(i in p for p in places)) for i in range(layers)]
    first = [value + 2 for name in _FIRST if isinstance(value := _attribute(config, name), int) and 0 < value < layers]
    period = [value for name in _PERIODS if isinstance(value := _attribute(config, name), int) and 1 < value < layers]
    cycles = [len(v) for v in (_attribute(config, n) for n in ("block_types",)) if isinstance(v, list)]
    least = min(layers, max([_LAYERS, *first, *period, *cycles]))
    for often in (2, 1):
        end = max((_place(rows, row, often) for row in set(rows)), default=0)
        if max(end + 1, least) <= _MOST_LAYERS:
            return max(end + 1, least) + _shared(config)
    raise ValueError(f"its pattern of layers needs {max(end + 1, least)} layers")


def _place(rows: list[Any], row: Any, often: int) -> int:
    """The index at which a row occurs for the `often`-th time, or for the last time if it occurs less often."""
    places = [i for i, other in enumerate(rows) if other == row]
    return places[min(often, len(places)) - 1]


def _shared(config: Any) -> int:
    """How many additional layers are kept that read the cache of other layers."""
    shared = _attribute(config, _SHARED)
    return min(shared, 5) if isinstance(shared, int) else 0


def _names(config: Any) -> list[str]:
    """Attributes that the constructor may take: annotated fields, its parameters, and the instance's attributes."""
    found = {n for c in type(config).__mro__ for n in getattr(c, "__annotations__", {})}
    found |= set(inspect.signature(type(config).__init__).parameters) | set(vars(config))
    return sorted(n for n in found if not n.startswith("__") and n != "self")


def _attribute(config: Any, name: str) -> Any:
    """An attribute of the config; None if reading it fails, as for attributes that differ by layer."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


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
