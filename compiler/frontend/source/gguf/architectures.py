"""What llama.cpp's architectures are among transformers' model types, beyond transformers' own tables.

Keys and rules are those of llama.cpp: `conversion/*.py` writes a file, `src/models/*.cpp` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from . import adjust as a
from . import hybrids as h
from .container import Container
from .keys import Facts, key
from .rope import partly_turned

_SOFTMAX = 1  # of `expert_gating_func`


@dataclass(frozen=True)
class Architecture:
    """kind: transformers' model type. fields: keys of the file, behind its architecture's name, and what they are in
    the configuration, beside `FIELDS`. names: ends of transformers' names of a layer's parameters, and what the file
    calls them behind "blk.N.", where the gguf package does not know. like: the architecture whose tensors lie as this
    one's do, where transformers undoes that. fixed: what all models of the kind have. turned_experts: transformers has
    their matrices [in, out], gate and up in turns. adjust: the rest. rows: the order of the rows of tensors
    of layers with states, by the configuration and the tensor. between: that of two matrices of a file that are one."""

    kind: str
    fields: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    like: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    turned_experts: bool = False
    adjust: Callable[[Container, Facts], None] | None = None
    rows: Callable[[Any, str], Tensor | None] | None = None
    between: Callable[[Any], Tensor] | None = None


_GRANITE = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
_INDEX = {
    "attention.indexer.head_count": "index_n_heads", "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}  # fmt: skip
_MAMBA2 = {"ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size", "ssm.group_count": "n_groups"}
_DEEPSEEK = {
    "attention.kv_lora_rank": "kv_lora_rank", "leading_dense_block_count": "first_k_dense_replace",
    "expert_shared_count": "n_shared_experts", "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob", "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
}  # fmt: skip


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama"),
    "gemma": Architecture("gemma", like="gemma2"),
    "gemma2": Architecture("gemma2", adjust=a.heads_of_gemma(46)),
    "gemma3": Architecture("gemma3_text", adjust=a.gemma3),
    "gemma4": Architecture(
        "gemma4_text",
        names={"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"},
        adjust=a.gemma4,
    ),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen3moe": Architecture("qwen3_moe"),
    "gpt-oss": Architecture("gpt_oss", turned_experts=True, adjust=a.gpt_oss),
    "minimax-m2": Architecture("minimax_m2", adjust=partly_turned),
    "phi3": Architecture("phi3", adjust=a.phi3),
    "lfm2": Architecture("lfm2", fixed={"block_auto_adjust_ff_dim": False}, adjust=h.lfm2),
    "falcon": Architecture("falcon", adjust=a.falcon),
    "mamba": Architecture("mamba", adjust=a.mamba),
    "stablelm": Architecture("stablelm", adjust=partly_turned),
    "nemotron": Architecture("nemotron", {"attention.layer_norm_epsilon": "norm_eps"}, adjust=partly_turned),
    "granite": Architecture("granite", _GRANITE, like="llama"),
    "granitemoe": Architecture(
        "granitemoe", _GRANITE, {"block_sparse_moe.router.weight": "ffn_gate_inp.weight"}, like="llama"
    ),
    "mamba2": Architecture("mamba2", _MAMBA2, {"mixer.dt_bias": "ssm_dt.bias"}, like="mamba", adjust=h.mamba2_alone),
    "deepseek2": Architecture(
        "deepseek_v3", _DEEPSEEK, {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}, adjust=a.deepseek
    ),
    "olmo2": Architecture("olmo2"),
    "olmoe": Architecture("olmoe", fixed={"norm_topk_prob": False}),
    "command-r": Architecture("cohere", {"logit_scale": "logit_scale"}, adjust=a.command_r),
    "cohere2": Architecture("cohere2", {"logit_scale": "logit_scale"}),
    "smollm3": Architecture("smollm3", like="llama"),
    "glm4": Architecture("glm4", adjust=partly_turned),
    "exaone4": Architecture("exaone4"),
    "seed_oss": Architecture("seed_oss", fixed={"attention_out_bias": False}),
    "mistral3": Architecture("ministral3", like="llama", adjust=a.ministral3),
    "ernie4_5": Architecture("ernie4_5"),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "phi2": Architecture("phi", adjust=partly_turned),
    "afmoe": Architecture("afmoe", fixed={"mup_enabled": True}, adjust=h.usual),
    "apertus": Architecture("apertus", adjust=h.usual),
    "arcee": Architecture("arcee", like="llama"),
    "chatglm": Architecture("glm", adjust=h.usual),
    "bert": Architecture("bert", adjust=a.bert),
    "cohere2moe": Architecture("cohere2_moe", {"logit_scale": "logit_scale"}, adjust=h.command_moe),
    "dbrx": Architecture("dbrx"),
    "deepseek32": Architecture("deepseek_v32", _INDEX, adjust=a.deepseek),
    "dots1": Architecture("dots1", adjust=h.usual),
    "ernie4_5-moe": Architecture("ernie4_5_moe", {"interleave_moe_layer_step": "moe_layer_interval"}, adjust=h.usual),
    "exaone-moe": Architecture("exaone_moe", adjust=h.usual),
    "falcon-h1": Architecture("falcon_h1", adjust=h.adjusted(h.mamba2(), h.falcon_h1)),
    "glm-dsa": Architecture("glm_moe_dsa", _INDEX, adjust=a.deepseek),
    "glm4moe": Architecture("glm4_moe", adjust=h.glm_moe),
    "gptneox": Architecture(
        "gpt_neox", {"use_parallel_residual": "use_parallel_residual"}, like="bloom", adjust=h.usual
    ),
    "granite_swa": Architecture("granite_swa", _GRANITE, like="llama", adjust=h.usual),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        _GRANITE,
        {"block_sparse_moe.router.weight": "ffn_gate_inp.weight"},
        like="llama",
        adjust=h.adjusted(h.kinds("attention", "mamba"), h.mamba2(), h.granite),
    ),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", adjust=h.usual),
    "hy_v3": Architecture("hy_v3", adjust=h.usual),
    "jais2": Architecture("jais2", adjust=h.usual),
    "jamba": Architecture("jamba", adjust=h.jamba),
    "laguna": Architecture("laguna", adjust=a.laguna),
    "lfm2moe": Architecture("lfm2_moe", adjust=h.kinds("full_attention", "conv")),
    "mellum": Architecture("mellum", adjust=h.usual),
    "minicpm3": Architecture("minicpm3", adjust=h.latent),
    "modern-bert": Architecture(
        "modernbert", {"attention.sliding_window": "local_attention", "hidden_activation": "hidden_activation"}
    ),
    "nemotron_h": Architecture(
        "nemotron_h", like="llama", adjust=h.adjusted(h.mamba2("mamba_", "head_dim"), h.nemotron_h)
    ),
    "nemotron_h_moe": Architecture(
        "nemotron_h", like="llama", adjust=h.adjusted(h.mamba2("mamba_", "head_dim"), h.nemotron_h)
    ),
    "olmo": Architecture("olmo", like="llama", adjust=h.usual),
    "phimoe": Architecture("phimoe", adjust=a.phimoe),
    "qwen35": Architecture("qwen3_5_text", like="gemma2", adjust=h.delta_rule, rows=h.delta_rows),
    "qwen35moe": Architecture("qwen3_5_moe_text", like="gemma2", adjust=h.delta_rule, rows=h.delta_rows),
    "qwen3next": Architecture("qwen3_next", like="gemma2", adjust=h.delta_rule, between=h.interleaved_rows),
    "starcoder": Architecture("gpt_bigcode"),
}


def found_architecture(container: Container, name: str) -> Architecture | None:
    """The entry of an architecture; some names stand for several model types."""
    if name == "llama" and key(container, "expert_count"):
        return Architecture("mixtral")
    if name == "mamba" and key(container, "ssm.dt_b_c_rms"):
        return Architecture("falcon_mamba", like="mamba", adjust=a.mamba)
    if name == "olmo2" and container.metadata.get("olmo2.attention.sliding_window"):
        return Architecture("olmo3", adjust=h.usual)
    if name == "granitemoe" and container.metadata.get("granitemoe.expert_shared_feed_forward_length"):
        return replace(ARCHITECTURES[name], kind="granitemoeshared")
    if name == "granitehybrid" and not container.metadata.get("granitehybrid.logit_scale"):
        return Architecture("bamba", like="llama", adjust=h.adjusted(h.mamba2(), h.bamba))
    if name == "deepseek2" and not any(tensor.endswith("exp_probs_b.bias") for tensor in container.tensors):
        if (key(container, "expert_gating_func") or _SOFTMAX) == _SOFTMAX:
            return Architecture("deepseek_v2", _DEEPSEEK, adjust=a.deepseek_v2)
    return ARCHITECTURES.get(name)
