"""Tiny checkpoints with a layer that predicts the token after the next one, named as in published checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

# names of weights after the layer's prefix, by icc's: those of DeepSeek V3 and GLM; those of Qwen3-Next and Qwen3.5
BEHIND = {"norm": "shared_head.norm.weight", "enorm": "enorm.weight", "hnorm": "hnorm.weight", "eh": "eh_proj.weight"}
OF_ITS_OWN = {
    "norm": "norm.weight",
    "enorm": "pre_fc_norm_embedding.weight",
    "hnorm": "pre_fc_norm_hidden.weight",
    "eh": "fc.weight",
}


def single(config: Any) -> Any:
    """The configuration of a one-layer model whose layer is like the extra one."""
    text = deepcopy(config)
    for name, value in {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse"],
        "first_k_dense_replace": 0,
    }.items():
        if getattr(text, name, None) is not None:
            setattr(text, name, value)
    text.num_hidden_layers = 1
    return text


LAYOUTS = ("glm4_moe", "qwen3_5", "qwen3_5_moe")  # keys of `layouts`


class WithLayer(NamedTuple):
    """A checkpoint with the layer, transformers' model of it, and a one-layer model of the extra layer and its norm."""

    checkpoint: Path
    oracle: Any
    layer: Any


def layouts() -> dict[str, Any]:
    """Configurations by name, with published layer patterns and tiny widths: GLM 4.5, Qwen3.5 dense and with
    experts."""
    import transformers as t

    base = {
        "vocab_size": 120, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    routed = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
    turned = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    delta = {
        "num_hidden_layers": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "rope_parameters": turned | {"mrope_section": [2, 1, 1]},
    }  # fmt: skip
    return {
        "glm4_moe": t.Glm4MoeConfig(
            **base, **routed, num_hidden_layers=2, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1,
            use_qk_norm=True, attention_bias=True, rope_parameters=turned, routed_scaling_factor=2.5,
        ),
        "qwen3_5": t.Qwen3_5TextConfig(**base, **delta),
        "qwen3_5_moe": t.Qwen3_5MoeTextConfig(
            **base, **routed, **delta, num_experts=4, shared_expert_intermediate_size=80
        ),
    }  # fmt: skip


def save_with_mtp(config: Any, path: Path, own: bool = False) -> WithLayer:
    """Write a random checkpoint with such a layer: under `mtp.` if `own`, else after the last layer.

    Layers add little to the embeddings, and the extra one passes these on, so that more of its guesses are right.
    """
    oracle, layer = save_tiny(config, path), save_tiny(single(config), path.with_name(path.name + ".mtp"), seed=1)
    for model, folder in ((oracle, path), (layer, path.with_name(path.name + ".mtp"))):
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "out_proj" in name or "down_proj" in name:
                parameter.data *= 0.1
        model.save_pretrained(folder)
    stored = load_file(path.with_name(path.name + ".mtp") / "model.safetensors")
    prefix, names = ("mtp.", OF_ITS_OWN) if own else (f"model.layers.{config.num_hidden_layers}.", BEHIND)
    blocks = prefix + "layers.0." if own else prefix
    hidden = config.hidden_size
    source = torch.Generator().manual_seed(2)
    added = {n.replace("model.layers.0.", blocks): w for n, w in stored.items() if n.startswith("model.layers.0.")}
    added[prefix + names["norm"]] = stored["model.norm.weight"]
    shift = float(stored["model.norm.weight"].mean() > 0.5)  # 0 for norms that multiply by 1 + weight
    for part in ("enorm", "hnorm"):
        added[prefix + names[part]] = shift + 0.1 * torch.randn(hidden, generator=source)
    noise = torch.randn(hidden, 2 * hidden, generator=source)
    added[prefix + names["eh"]] = torch.eye(hidden, 2 * hidden) + 0.05 * noise
    tensors = load_file(path / "model.safetensors") | {n: w.contiguous().clone() for n, w in added.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return WithLayer(path, oracle, layer)


def reference(pair: WithLayer, text: Sequence[int], count: int) -> list[int]:
    """The chain of `count` guesses after a text, from the model's hidden states of the whole text, in float32."""
    stored = load_file(pair.checkpoint / "model.safetensors")
    names = {
        "enorm": ("enorm.weight", "pre_fc_norm_embedding.weight"),
        "hnorm": ("hnorm.weight", "pre_fc_norm_hidden.weight"),
        "eh_proj": ("eh_proj.weight", "mtp.fc.weight"),
    }
    parts = {part: next(w for n, w in stored.items() if n.endswith(ends)) for part, ends in names.items()}
    last = pair.layer.get_decoder().norm

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        before, last.weight.data = last.weight.data, parts[name].float()
        try:
            return last(x)
        finally:
            last.weight.data = before

    chain: list[int] = []
    with torch.no_grad():
        whole = pair.oracle.model(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state
        hidden = whole[:, :-1]
        for _ in range(count):
            embedded = pair.oracle.get_input_embeddings()(torch.tensor([[*text[1:], *chain]]))
            x = torch.cat([norm("enorm", embedded), norm("hnorm", hidden)], -1) @ parts["eh_proj"].float().T
            states = pair.layer.model(inputs_embeds=x, use_cache=False).last_hidden_state
            chain.append(int(pair.oracle.lm_head(states[:, -1]).argmax()))
            hidden = torch.cat([hidden, states[:, -1:]], 1)
    return chain
