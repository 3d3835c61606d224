"""The table of llama.cpp's metadata: which key of a GGUF file becomes which field of transformers' configuration.

A key that is in no line and that no rule of its architecture reads is refused by name if its value matters
(`unused.py`). A new key needs one line here, or one for its architecture in `architectures.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .keys import Facts
from .rope import rope_of, turned_dims


class UnreadKey(enum.Enum):
    """Which values a file may have in a key without a place in the configuration.

    ANYTHING: any value. NOTHING: 0, false, an empty list or a factor of 1.0. REFUSED: no value, the file must not have
    the key.
    """

    ANYTHING = enum.auto()
    NOTHING = enum.auto()
    REFUSED = enum.auto()


ANYTHING, NOTHING, REFUSED = UnreadKey.ANYTHING, UnreadKey.NOTHING, UnreadKey.REFUSED
Expected = Any  # a value, an UnreadKey, or a function from the configuration as a dict to one of them


@dataclass(frozen=True)
class Field:
    """One key of a file, without the architecture's name before it.

    path: its place in the configuration; among several names, the first that the configuration's type has; "a.b" is b
    of the dict a; (): no place. default: the value in the configuration for a file without the key; None: the type's
    own default. expect: the values that a file may have if the configuration has no place for the key, or a rule put
    another value there.
    """

    key: str
    path: str | tuple[str, ...] = ()
    default: Any = None
    expect: Expected = NOTHING

    @property
    def names(self) -> tuple[str, ...]:
        """The places in a configuration, the preferred one first."""
        return (self.path,) if isinstance(self.path, str) else self.path

    def place(self, fields: Facts) -> str | None:
        """The place in a configuration whose names are `fields`; None if it has none. A single name is taken as it is,
        because some configurations do not show every name that they take."""
        if isinstance(self.path, str):
            return self.path
        return next((name for name in self.path if name in fields or name == "rope_theta"), None)

    def expected(self, config: Facts) -> Any:
        """The value or the UnreadKey that the file may have, given the configuration as a dict."""
        return self.expect(config) if callable(self.expect) else self.expect


def table(own: Iterable[Field]) -> dict[str, Field]:
    """The fields of an architecture by key: `own`, and COMMON for keys that `own` does not have."""
    found = {field.key: field for field in own}
    return found | {field.key: field for field in COMMON if field.key not in found}


def said(fields: Mapping[str, Field], metadata: Mapping[str, Any], arch: str) -> Iterator[tuple[Field, Any]]:
    """The fields whose keys a file has, each with its value."""
    for field in fields.values():
        if (value := metadata.get(f"{arch}.{field.key}")) is not None:
            yield field, value


def _or(unread: UnreadKey, of: Callable[[Facts], Any]) -> Callable[[Facts], Any]:
    """The value that a configuration implies for a key; `unread` if it implies none."""

    def expected(config: Facts) -> Any:
        found = of(config)
        return unread if found is None else found

    return expected


def _epsilon(config: Facts) -> float | None:
    return next((config[name] for name in _EPSILONS if name in config), None)


_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon")
# `expert_gating_func`: 1 is a softmax, the default; architectures with this line have another function
SIGMOID = Field("expert_gating_func", expect=2)
# says whether positions are rotated: the key `rope.scaling.finetuned`
TURNED = Field("rope.scaling.finetuned", expect=True)
SEES_ALL = Field("attention.causal", expect=False)

COMMON: tuple[Field, ...] = (
    # sizes; those with ANYTHING are checked by the shapes of tensors, which do not fit a model of another size
    Field("vocab_size", expect=ANYTHING),
    Field("block_count", ("num_hidden_layers",)),
    Field("embedding_length", ("hidden_size",)),
    Field("feed_forward_length", ("intermediate_size",), expect=ANYTHING),
    Field("attention.head_count", ("num_attention_heads",)),
    Field("attention.head_count_kv", ("num_key_value_heads",), expect=ANYTHING),
    Field("attention.key_length", ("head_dim",), expect=ANYTHING),
    Field("attention.value_length", ("v_head_dim",), expect=ANYTHING),
    Field("attention.key_length_swa", expect=ANYTHING),
    Field("attention.value_length_swa", expect=ANYTHING),
    Field("attention.kv_lora_rank", ("kv_lora_rank",)),
    Field("attention.q_lora_rank", ("q_lora_rank",)),
    # norms and attention
    Field(
        "attention.layer_norm_rms_epsilon",
        ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
        expect=_or(REFUSED, _epsilon),
    ),
    Field(
        "attention.layer_norm_epsilon",
        ("layer_norm_eps", "layer_norm_epsilon", "norm_eps"),
        expect=_or(REFUSED, _epsilon),
    ),
    Field("attention.sliding_window", ("sliding_window",)),
    Field("attention.clamp_kqv", ("clip_qkv",)),
    Field("attention.causal", expect=True),
    Field("attention.indexer.types", expect=True),
    Field("attn_logit_softcapping", ("attn_logit_softcapping",)),
    Field("final_logit_softcapping", ("final_logit_softcapping",)),
    Field("use_parallel_residual", expect=_or(NOTHING, lambda config: config.get("use_parallel_residual"))),
    # positions
    Field("rope.freq_base", ("rope_theta",), expect=_or(ANYTHING, lambda config: rope_of(config).get("rope_theta"))),
    Field("rope.dimension_count", expect=_or(ANYTHING, turned_dims)),
    Field("rope.dimension_count_swa", expect=_or(NOTHING, lambda config: turned_dims(config, "sliding_attention"))),
    Field(
        "rope.freq_base_swa",
        expect=_or(NOTHING, lambda config: rope_of(config, "sliding_attention").get("rope_theta")),
    ),
    # experts
    Field("expert_count", ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")),
    Field("expert_used_count", ("num_experts_per_tok", "moe_k", "moe_topk")),
    Field("expert_feed_forward_length", ("moe_intermediate_size",), expect=ANYTHING),
    Field(
        "expert_shared_feed_forward_length",
        ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
        expect=ANYTHING,
    ),
    Field("expert_shared_count", ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), expect=ANYTHING),
    Field(
        "expert_weights_scale",
        ("routed_scaling_factor", "route_scale", "moe_routed_scaling_factor", "router_scaling_factor"),
        default=1.0,
    ),
    Field("expert_weights_norm", ("norm_topk_prob", "route_norm"), expect=REFUSED),
    Field("expert_gating_func", expect=1),
    Field("expert_group_count", ("n_group",), default=1, expect=1),
    Field("expert_group_used_count", ("topk_group",), default=1, expect=1),
    Field(
        "leading_dense_block_count",
        ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
        expect=ANYTHING,
    ),
    # layers with states
    Field("ssm.conv_kernel", ("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim")),
    Field("ssm.state_size", ("ssm_state_size", "mamba_d_state", "state_size", "linear_key_head_dim")),
    Field("ssm.group_count", ("n_groups", "mamba_n_groups", "linear_num_key_heads")),
    Field("ssm.time_step_rank", ("mamba_num_heads", "mamba_n_heads", "mamba_dt_rank", "linear_num_value_heads")),
    Field("ssm.inner_size", expect=ANYTHING),
    Field("shortconv.l_cache", ("conv_L_cache",)),
    # without effect on a text's results: limits, how the file was made, axes of images, what follows the last layer
    Field("context_length", ("max_position_embeddings",), expect=ANYTHING),
    Field("tensor_data_layout", expect=ANYTHING),
    Field("rope.scaling.finetuned", expect=ANYTHING),
    Field("rope.dimension_sections", expect=ANYTHING),
    Field("pooling_type", expect=ANYTHING),
    Field("classifier.pooling_type", expect=ANYTHING),
)
