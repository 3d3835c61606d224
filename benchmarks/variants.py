"""Random configurations of any model type, which no published checkpoint has but its class allows.

A few random changes are made to the tiny configuration of `tiny_config`, each to a field by its name or by the kind of
its value: patterns of layers (shuffled, shorter, one kind only), heads and their sizes, states, convolutions, groups,
experts and their routing, rotary scaling, windows, soft caps, activations, biases, ties, multipliers. The script has no
knowledge of single types; transformers refuses impossible configurations.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator
from typing import Any

from tiny_config import tiny_options

_ACTIVATIONS = "silu gelu gelu_new gelu_pytorch_tanh relu relu2 quick_gelu sigmoid tanh mish".split()
_ACTIVATION = re.compile(r"hidden_act$|activation_function$|hidden_activation$|mamba_act$|afn$|ff_activation$")
_NO_PART_OF_THE_MODEL = re.compile(
    r"drop|_init|init_|initializer|use_cache|output_|return_|is_encoder|is_decoder|cross_attention|summary|_loss|aux_|"
    r"jitter|kernels$|use_mambapy|associative|time_step_(min|max|floor)|_std|use_mems|bidirectional|slow_but|"
    r"token_id|mtp|nextn|prefix_lm|causal|transformers_version|pretraining|num_labels|tp$|clamp_len|seed|rescale_prenorm"
)
# pattern of a field's name, values to draw from
_NUMBERS: tuple[tuple[re.Pattern[str], tuple[Any, ...]], ...] = tuple(
    (re.compile(pattern), values)
    for pattern, values in (
        (r"conv_kernel|d_conv$|conv_L_cache|conv1d_width|conv_kernel_size", (2, 3, 4, 5)),
        (r"d_state$|state_size$", (8, 16, 24, 32, 40)),
        (r"mamba_n_?groups$|^n_groups$", (1, 2, 4, 8)),
        (r"(^|mamba_)chunk_size$|attention_chunk_size", (4, 8, 16, 64)),
        (r"linear_(num_)?key_heads$|linear_num_key_heads", (1, 2, 4)),
        (r"linear_num_value_heads|linear_num_heads", (2, 4, 6, 8)),
        (r"linear_.*head_dim$", (8, 16, 24, 40)),
        (r"dt_rank$|time_step_rank|lora_rank$", (4, 8, 12, 20)),
        (r"num_experts$|n_routed_experts|num_local_experts|moe_num_experts", (3, 4, 6, 8)),
        (r"experts_per_tok(en)?$|moe_top_?k$|moe_k$|top_k_experts", (1, 2, 3)),
        (r"n_group$|num_expert_group", (1, 2, 4)),
        (r"topk_group", (1, 2)),
        (r"shared_experts$", (0, 1, 2, 3)),
        (r"first_k_dense|num_dense_layers|layer_start_index", (0, 1, 2)),
        (r"layer_period$|sparse_step|layer_interval|layer_group_size|no_rope_layer_interval", (1, 2, 3)),
        (r"layer_offset$", (0, 1, 2)),
        (r"intermediate_size$|ffn_hidden_size$|ffn_dim$|dense_intermediate", (40, 56, 96, 100)),
        (r"sliding_window(_size)?$|window_size$|local_attention$", (1, 3, 5, 8, 16, 100)),
        (r"index_topk$|indexer_budget", (4, 8, 16, 64)),
        (r"qk_nope_head_dim|^v_head_dim|swa_v_head_dim", (8, 12, 16, 20)),
        (r"qk_rope_head_dim", (4, 8, 12)),
        (r"softcap|soft_cap", (None, 2.0, 5.0, 30.0)),
        (r"multiplier$|_scal(e|ing)$|scaling_factor$|scale_emb|(logit|route|attn)_scale", (0.25, 0.7, 1.0, 2.5)),
        (r"partial_rotary_factor|rotary_pct", (0.25, 0.5, 1.0)),
        (r"eps(ilon)?$", (1e-6, 1e-3)),
        (r"vocab_size$", (97, 160)),
        (r"num_kv_shared_layers", (0, 1, 2)),
        (r"query_pre_attn_scalar", (8, 24)),
    )
)
_HEADS = ((6, 3), (5, 1), (4, 4), (6, 2), (7, 7), (3, 1), (8, 2), (2, 2), (1, 1))
_HEAD_NAMES = (
    ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"),
    ("n_head", "n_head_kv", "head_dim", "n_embd"),
)


def variants(name: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield configurations of `TYPE#SEED`, each with its changes: the first has most changes, later ones fewer."""
    model_type = name.partition("#")[0]
    cls, tiny = tiny_options(model_type)
    for options in tiny:
        yield from _drawn(cls, options, random.Random(name))


def _drawn(cls: Any, options: dict[str, Any], draw: random.Random) -> Iterator[tuple[Any, dict[str, Any]]]:
    whole = cls(**options)
    text = whole.get_text_config(decoder=True)
    changes = _changes(text, draw)
    taken = draw.sample(changes, min(len(changes), draw.choice((4, 8, 12))))
    while taken:
        changed: dict[str, Any] = {}
        for change in taken:
            changed |= change
        made = options | changed
        for place in (name for name in cls.sub_configs if getattr(whole, name, None) is text):
            made = options | {place: options[place] | changed}
        with contextlib.suppress(Exception):  # the class may refuse them with any error
            yield cls(**made), changed
        taken = taken[: len(taken) // 2]


def _changes(config: Any, draw: random.Random) -> list[dict[str, Any]]:
    """One random change for each field or group of fields that can be changed."""
    found = {n: _value(config, n) for n in sorted({*vars(config), *type(config).__annotations__})}
    found = {n: v for n, v in found.items() if not n.startswith("_") and not _NO_PART_OF_THE_MODEL.search(n)}
    out = [*_state_heads(found, draw), *_heads(found, draw), *_patterns(found, draw), *_rope(found, config, draw)]
    for name, value in found.items():
        if isinstance(value, bool):
            out.append({name: not value})
        elif _ACTIVATION.search(name):
            out.append({name: draw.choice(_ACTIVATIONS)})
        elif value is None or isinstance(value, (int, float)):
            choices = next((values for pattern, values in _NUMBERS if pattern.search(name)), ())
            if choices and (value is not None or "window" in name or "softcap" in name):
                out.append({name: draw.choice(choices)})
    return out


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # it differs by layer
        return ()


def _heads(found: dict[str, Any], draw: random.Random) -> list[dict[str, Any]]:
    heads, groups = draw.choice(_HEADS)
    dim = draw.choice((8, 12, 16, 20, 24, 40))
    for names in _HEAD_NAMES:
        if all(isinstance(found.get(name), int) for name in (names[0], names[3])):
            latent = "kv_lora_rank" in found
            own = isinstance(found.get(names[2]), int) and not latent
            if any(name.startswith(("mamba", "n_mamba")) for name in found) and not own:  # tied to hidden size
                heads, groups = draw.choice(((8, 2), (2, 1), (1, 1), (8, 8)))
                dim = found[names[3]] // heads
            out = {names[0]: heads, names[3]: draw.choice((48, 60, 64)) if own else heads * dim}
            if found.get(names[1]) is not None:
                out[names[1]] = heads if latent or found[names[1]] == found[names[0]] else groups
            return [out | {names[2]: dim} if own else out]
    return []


def _state_heads(found: dict[str, Any], draw: random.Random) -> list[dict[str, Any]]:
    """A change of the heads of a state space and of their size, whose product stays."""
    for count, size in (("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim")):
        if isinstance(found.get(count), int) and isinstance(found.get(size), int):
            heads = draw.choice((2, 4, 16))
            return [{count: heads, size: found[count] * found[size] // heads}]
    return []


def _patterns(found: dict[str, Any], draw: random.Random) -> list[dict[str, Any]]:
    """A change of the per-layer lists: another order, fewer layers, or one kind only; [] if nothing can be changed."""
    lists = {n: v for n, v in found.items() if isinstance(v, list) and len(v) > 1 and not n.startswith("mtp")}
    count = found.get("num_hidden_layers")
    lists = {n: v for n, v in lists.items() if len(v) == count and all(isinstance(x, (str, int, float)) for x in v)}
    if not lists:
        return [{"num_hidden_layers": draw.choice((1, 3))}] if isinstance(count, int) and count == 2 else []
    order = list(range(len(next(iter(lists.values())))))
    match draw.choice(("shuffled", "reversed", "shifted", "shorter", "one", "apart")):
        case "shuffled":
            draw.shuffle(order)
        case "reversed":
            order.reverse()
        case "shifted":
            order = [*order[1:], order[0]]
        case "shorter":
            order = sorted(draw.sample(order, max(1, len(order) // 2)))
        case "one":
            order = [draw.choice(order)] * 3
        case _:  # shuffle each list separately
            return [{n: draw.sample(v, len(v)) for n, v in lists.items() if not n.startswith("layer_rope")}]
    out: dict[str, Any] = {name: [value[i] for i in order] for name, value in lists.items()}
    return [out if len(order) == count else out | {"num_hidden_layers": len(order)}]


def _rope(found: dict[str, Any], config: Any, draw: random.Random) -> list[dict[str, Any]]:
    rope = found.get("rope_parameters")
    if not isinstance(rope, dict) or not rope:
        return []
    if any(isinstance(v, dict) for v in rope.values()):
        return [{"rope_parameters": {k: _scaled(v, config, draw) for k, v in rope.items()}}]
    return [{"rope_parameters": _scaled(rope, config, draw)}]


def _scaled(rope: Any, config: Any, draw: random.Random) -> Any:
    if not isinstance(rope, dict) or "mrope_section" in rope:
        return rope
    share = rope.get("partial_rotary_factor", 1.0)
    if "partial_rotary_factor" in rope:
        share = draw.choice((0.25, 0.5, 1.0))
    dims = _value(config, "qk_rope_head_dim") or _value(config, "head_dim")
    dims = dims or config.hidden_size // config.num_attention_heads
    pairs = int(dims * share) // 2
    kinds: tuple[dict[str, Any], ...] = (
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 0.7,
         "mscale_all_dim": 0.5, "truncate": False},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 16},
        {"rope_type": "longrope", "short_factor": [1.0] * pairs,
         "long_factor": [1.0 + 0.3 * i for i in range(pairs)], "original_max_position_embeddings": 16, "factor": 4.0},
    )  # fmt: skip
    theta = {"rope_theta": draw.choice((100.0, 10000.0))} if "rope_theta" in rope else {}
    return {**theta, **draw.choice(kinds), **({"partial_rotary_factor": share} if share < 1 else {})}
