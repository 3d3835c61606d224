"""The table of llama.cpp's architectures: for each, transformers' model type and the peculiarities of its files.

Keys and rules are those of llama.cpp: `conversion/*.py` writes a file, `src/models/*.cpp` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from .....runtime.format.gguf import GgufContainer
from . import adjust as a
from . import hybrids as h
from .fields import ANYTHING, SEES_ALL, SIGMOID, TURNED, Field, table
from .keys import Facts, key
from .rope import partly_turned

_SOFTMAX = 1  # value of `expert_gating_func`


@dataclass(frozen=True)
class Architecture:
    """How files of one architecture are read.

    kind: transformers' model type.
    own: fields of its table of keys that `fields.COMMON` lacks or defines differently.
    names: suffixes of transformers' parameter names in a layer, with the file's names after "blk.N.", if the gguf
    package does not have them.
    like: the architecture with the same arrangement of tensors, whose processor in transformers undoes it; "": itself.
    fixed: configuration values that all models of the kind have.
    period: for files that do not list the layers with windows: one of how many layers has full attention, and whether
    it is the first of them. None: such a file has no windows per layer.
    scales_rope: rotary frequencies are scaled as llama.cpp's common keys say; else as `adjust` says.
    turned_experts: transformers has the experts' matrices transposed, [in, out], with gate and up interleaved.
    adjust: completes the configuration from the file; None: nothing to do.
    rows: for a configuration and a tensor's name after "blk.N.", the row number in the file of each row in
    transformers' order (for "ssm_out.weight", of each column); None if the orders are equal.
    between: the row order of two matrices of a file that transformers joins; None: one after the other.
    """

    kind: str
    own: tuple[Field, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    like: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    period: tuple[int, bool] | None = None
    scales_rope: bool = True
    turned_experts: bool = False
    adjust: Callable[[GgufContainer, Facts], None] | None = None
    rows: Callable[[Any, str], Tensor | None] | None = None
    between: Callable[[Any], Tensor] | None = None

    @cached_property
    def table(self) -> dict[str, Field]:
        """Its own fields and the common ones, by key."""
        return table(self.own)

    @property
    def sees_all(self) -> bool:
        """Whether it is an encoder, whose tokens see later ones."""
        return SEES_ALL in self.own


_ROUTER = {"block_sparse_moe.router.weight": "ffn_gate_inp.weight"}
_GRANITE = (
    Field("attention.scale", "attention_multiplier"),
    Field("embedding_scale", "embedding_multiplier"),
    Field("residual_scale", "residual_multiplier"),
    Field("logit_scale", "logits_scaling"),
)
_LATENT = (Field("expert_weights_norm", "norm_topk_prob", default=False),)
_INDEXED = (
    *_LATENT,
    SIGMOID,
    Field("attention.indexer.head_count", "index_n_heads"),
    Field("attention.indexer.key_length", "index_head_dim"),
    Field("attention.indexer.top_k", "index_topk"),
)
_LOGIT_SCALE = Field("logit_scale", "logit_scale")
_LOCAL_EXPERTS = Field("expert_count", "num_local_experts")
_NORMED = Field("expert_weights_norm", ("norm_topk_prob", "route_norm"), expect=True)
_MAMBA = (Field("ssm.time_step_rank", "time_step_rank"), Field("ssm.inner_size", "intermediate_size", expect=ANYTHING))
_NEMOTRON_H = Architecture(
    "nemotron_h",
    (SIGMOID, Field("moe_latent_size", "moe_latent_size")),
    like="llama",
    adjust=h.adjusted(h.mamba2("mamba_", "head_dim"), h.nemotron_h),
)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama"),
    "mistral": Architecture("mistral"),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gpt2": Architecture("gpt2", (Field("feed_forward_length", "n_inner"),)),
    "bloom": Architecture("bloom", fixed={"tie_word_embeddings": True}),
    "starcoder2": Architecture("starcoder2", (Field("attention.layer_norm_epsilon", "norm_epsilon"),)),
    "gemma": Architecture("gemma", like="gemma2", scales_rope=False),
    "gemma2": Architecture(
        "gemma2",
        (Field("attention.sliding_window", "sliding_window", default=4096),),
        period=(2, False),
        scales_rope=False,
        adjust=a.heads_of_gemma(46),
    ),
    "gemma3": Architecture(
        "gemma3_text",
        (
            Field("rope.freq_base", "rope_parameters.full_attention.rope_theta", default=1e4),
            Field("rope.freq_base_swa", "rope_parameters.sliding_attention.rope_theta", default=1e4),
        ),
        period=(6, False),
        scales_rope=False,
        adjust=a.gemma3,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        (
            Field("attention.key_length", "global_head_dim", expect=ANYTHING),
            Field("attention.shared_kv_layers", "num_kv_shared_layers", default=0),
            Field("embedding_length_per_layer_input", "hidden_size_per_layer_input", default=0),
            Field("expert_used_count", "top_k_experts"),
            Field("rope.freq_base", "rope_parameters.full_attention.rope_theta", default=1e4),
            Field("rope.freq_base_swa", "rope_parameters.sliding_attention.rope_theta", default=1e4),
        ),
        names={"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"},
        scales_rope=False,
        adjust=a.gemma4,
    ),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen3moe": Architecture(
        "qwen3_moe",
        (
            Field("attention.key_length", "head_dim", expect=ANYTHING),
            Field("expert_weights_norm", "norm_topk_prob", default=True),
        ),
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        (_LOCAL_EXPERTS, Field("expert_feed_forward_length", "intermediate_size", expect=ANYTHING)),
        period=(2, False),
        turned_experts=True,
        adjust=a.gpt_oss,
    ),
    "minimax-m2": Architecture(
        "minimax_m2", (SIGMOID, _LOCAL_EXPERTS), fixed={"use_routing_bias": True}, adjust=partly_turned
    ),
    "phi3": Architecture("phi3", adjust=a.phi3),
    "lfm2": Architecture("lfm2", fixed={"block_auto_adjust_ff_dim": False}, adjust=h.lfm2),
    "falcon": Architecture(
        "falcon",
        (
            Field("attention.head_count_kv", "num_kv_heads", default=1, expect=ANYTHING),
            Field("attention.layer_norm_epsilon", "layer_norm_epsilon", default=1e-5),
            Field("feed_forward_length", "ffn_hidden_size", expect=ANYTHING),
        ),
        fixed={"tie_word_embeddings": True},
        adjust=a.falcon,
        rows=a.falcon_rows,
    ),
    "mamba": Architecture("mamba", _MAMBA, adjust=a.mamba),
    "stablelm": Architecture("stablelm", adjust=a.stablelm),
    "nemotron": Architecture("nemotron", (Field("attention.layer_norm_epsilon", "norm_eps"),), adjust=partly_turned),
    "granite": Architecture("granite", (*_GRANITE, TURNED), like="llama"),
    "granitemoe": Architecture("granitemoe", (*_GRANITE, TURNED), _ROUTER, like="llama"),
    "mamba2": Architecture("mamba2", names={"mixer.dt_bias": "ssm_dt.bias"}, like="mamba", adjust=h.mamba2_alone),
    "deepseek2": Architecture("deepseek_v3", (*_LATENT, SIGMOID), adjust=a.deepseek),
    "olmo2": Architecture("olmo2"),
    "olmoe": Architecture("olmoe", fixed={"norm_topk_prob": False}),
    "command-r": Architecture("cohere", (_LOGIT_SCALE,), adjust=a.command_r),
    "cohere2": Architecture("cohere2", (_LOGIT_SCALE,), period=(4, False)),
    "smollm3": Architecture("smollm3", like="llama"),
    "glm4": Architecture("glm4", adjust=partly_turned),
    "exaone4": Architecture("exaone4", fixed={"sliding_window": None}, period=(4, False)),
    "seed_oss": Architecture("seed_oss", fixed={"attention_out_bias": False}),
    "mistral3": Architecture(
        "ministral3",
        (Field("attention.temperature_scale", "rope_parameters.llama_4_scaling_beta", default=0.0),),
        like="llama",
        adjust=a.ministral3,
    ),
    "ernie4_5": Architecture("ernie4_5"),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "phi2": Architecture("phi", adjust=partly_turned),
    "afmoe": Architecture("afmoe", (SIGMOID,), fixed={"mup_enabled": True}, period=(4, False), adjust=h.usual),
    "apertus": Architecture("apertus", adjust=h.usual),
    "arcee": Architecture("arcee", like="llama"),
    "chatglm": Architecture("glm", adjust=h.usual),
    "bert": Architecture(
        "bert",
        (SEES_ALL, Field("attention.layer_norm_epsilon", "layer_norm_eps", default=1e-12)),
        adjust=a.bert,
    ),
    "cohere2moe": Architecture("cohere2_moe", (_LOGIT_SCALE,), period=(4, True), adjust=h.command_moe),
    "deepseek32": Architecture("deepseek_v32", _INDEXED, adjust=a.deepseek),
    "dots1": Architecture("dots1", (SIGMOID,), adjust=h.usual),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", (Field("interleave_moe_layer_step", "moe_layer_interval"),), adjust=h.usual
    ),
    "exaone-moe": Architecture("exaone_moe", (SIGMOID,), period=(4, False), adjust=h.usual),
    "falcon-h1": Architecture(
        "falcon_h1", (Field("ssm.inner_size", "mamba_d_ssm"),), adjust=h.adjusted(h.mamba2(), h.falcon_h1)
    ),
    "glm-dsa": Architecture("glm_moe_dsa", _INDEXED, adjust=a.deepseek),
    "glm4moe": Architecture(
        "glm4_moe",
        (SIGMOID, Field("leading_dense_block_count", "first_k_dense_replace", default=0, expect=ANYTHING)),
        adjust=h.usual,
    ),
    "gptneox": Architecture(
        "gpt_neox", (Field("use_parallel_residual", "use_parallel_residual"),), like="bloom", adjust=h.usual
    ),
    "granite_swa": Architecture("granite_swa", (*_GRANITE, TURNED), like="llama", adjust=h.usual),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        _GRANITE,
        _ROUTER,
        like="llama",
        adjust=h.adjusted(h.kinds("attention", "mamba"), h.mamba2(), h.granite),
    ),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", adjust=h.usual),
    "hy_v3": Architecture("hy_v3", (SIGMOID, _NORMED), adjust=h.usual),
    "jais2": Architecture("jais2", adjust=h.usual),
    "jamba": Architecture("jamba", adjust=h.jamba),
    "laguna": Architecture("laguna", (SIGMOID, _NORMED), period=(4, True), adjust=a.laguna),
    "lfm2moe": Architecture("lfm2_moe", (SIGMOID,), adjust=h.kinds("full_attention", "conv")),
    "mellum": Architecture("mellum", period=(4, False), adjust=h.usual),
    "minicpm3": Architecture("minicpm3", adjust=h.latent),
    "modern-bert": Architecture(
        "modernbert",
        (
            SEES_ALL,
            Field("attention.sliding_window", "local_attention"),
            Field("hidden_activation", "hidden_activation"),
        ),
        period=(3, True),
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "olmo": Architecture("olmo", (Field("attention.layer_norm_epsilon", expect=1e-5),), like="llama", adjust=h.usual),
    "phimoe": Architecture("phimoe", adjust=a.phimoe),
    "qwen35": Architecture("qwen3_5_text", like="gemma2", adjust=h.delta_rule, rows=h.delta_rows),
    "qwen35moe": Architecture("qwen3_5_moe_text", like="gemma2", adjust=h.delta_rule, rows=h.delta_rows),
    "qwen3next": Architecture("qwen3_next", like="gemma2", adjust=h.delta_rule, between=h.interleaved_rows),
    "starcoder": Architecture("gpt_bigcode"),
}


def _says(name: str) -> Callable[[GgufContainer], bool]:
    """A test for files whose key `name` has a non-zero value."""
    return lambda container: bool(container.metadata.get(f"{container.metadata['general.architecture']}.{name}"))


def _softmax_without_bias(container: GgufContainer) -> bool:
    """Whether a file is of DeepSeek-V2, whose files state the same architecture as V3's."""
    if any(name.endswith("exp_probs_b.bias") for name in container.tensors):
        return False
    return (key(container, "expert_gating_func") or _SOFTMAX) == _SOFTMAX


# architectures whose files may be of two model types: a test for files of the second type, and its entry
VARIANTS: dict[str, tuple[Callable[[GgufContainer], bool], Architecture]] = {
    "llama": (_says("expert_count"), Architecture("mixtral")),
    "mamba": (
        _says("ssm.dt_b_c_rms"),
        Architecture("falcon_mamba", (*_MAMBA, Field("ssm.dt_b_c_rms", expect=True)), like="mamba", adjust=a.mamba),
    ),
    "olmo2": (_says("attention.sliding_window"), Architecture("olmo3", period=(4, False), adjust=h.usual)),
    "granitemoe": (
        _says("expert_shared_feed_forward_length"),
        replace(ARCHITECTURES["granitemoe"], kind="granitemoeshared"),
    ),
    "granitehybrid": (
        lambda container: not _says("logit_scale")(container),
        Architecture("bamba", (TURNED,), like="llama", adjust=h.adjusted(h.mamba2(), h.bamba)),
    ),
    "deepseek2": (_softmax_without_bias, Architecture("deepseek_v2", _LATENT, adjust=a.deepseek_v2)),
}


def found_architecture(container: GgufContainer, name: str) -> Architecture | None:
    """The entry of an architecture, by its name and the file's content; None if no table has it."""
    holds, variant = VARIANTS.get(name, (None, None))
    return variant if holds is not None and holds(container) else ARCHITECTURES.get(name)


def architectures_of(kind: str) -> Iterator[tuple[str, Architecture]]:
    """llama.cpp's names for a model type of transformers, with their entries; the most common first."""
    yield from ((name, own) for name, own in ARCHITECTURES.items() if own.kind == kind)
    yield from ((name, own) for name, (_, own) in VARIANTS.items() if own.kind == kind)
