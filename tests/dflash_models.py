"""Tiny DFlash drafters in z-lab's and in transformers' layout, and the guesses of published code with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from eagle_models import CASES as EAGLES
from eagle_models import target_of
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

BLOCK, MASK, HEAD, WINDOW = 9, 118, 16, 5


@dataclass(frozen=True)
class Drafter:
    """A tiny drafter: its layout (z-lab's or transformers'), the layers of the model that it reads, the kinds of its
    own layers, and fields that change it."""

    zlab: bool
    taps: tuple[int, ...]
    kinds: tuple[str, ...]
    is_causal: bool | None = None
    scale: float = 1.0

    def sees(self, layer: int, length: int) -> torch.Tensor:
        """Boolean [BLOCK, length]: which keys the last BLOCK tokens see in a layer, by published code."""
        key = torch.arange(length)[None, :]
        distance = torch.arange(length - BLOCK, length)[:, None] - key
        windowed = self.kinds[layer] == "sliding_attention"
        causal = windowed if self.is_causal is None else self.is_causal
        seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        return seen & (distance.abs() < WINDOW) if windowed else seen


FULL, NEAR = "full_attention", "sliding_attention"
CASES = {
    "zlab": Drafter(True, (1, 2, 4), (FULL, FULL)),
    "zlab-windows": Drafter(True, (0, 4), (NEAR, FULL, NEAR), scale=8.0),
    "zlab-both_ways": Drafter(True, (2,), (NEAR, FULL), is_causal=False),
    "zlab-causal": Drafter(True, (3, 4), (FULL,), is_causal=True),
    "transformers": Drafter(False, (0, 3), (NEAR, FULL)),
}


def config_of(drafter: Drafter, target: Any) -> dict[str, Any]:
    """config.json, with the fields that published ones have and that change nothing."""
    layers = {
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": HEAD, "hidden_act": "silu",
        "hidden_size": 64, "intermediate_size": 96, "layer_types": list(drafter.kinds), "max_position_embeddings": 256,
        "num_attention_heads": 4, "num_hidden_layers": len(drafter.kinds), "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "sliding_window": WINDOW, "dtype": "bfloat16",
    }  # fmt: skip
    read = {"mask_token_id": MASK, "target_layer_ids": list(drafter.taps)}
    if not drafter.zlab:
        rope = {"rope_theta": 10000.0, "rope_type": "default"}
        made = {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
        return {**made, **layers, **read, "block_size": BLOCK, "pad_token_id": 0, "rope_parameters": rope}
    own = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "attention_bias": False, "initializer_range": 0.02, "max_window_layers": 3, "use_sliding_window": True,
        "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False, "use_cache": True,
        "vocab_size": target.vocab_size, "num_target_layers": target.num_hidden_layers, "block_size": BLOCK,
        "dflash_config": read | ({"input_embedding_scale": drafter.scale} if drafter.scale != 1 else {}),
    }  # fmt: skip
    return layers | own | ({} if drafter.is_causal is None else {"is_causal": drafter.is_causal})


def save_target(path: Path, kind: str = "specforge") -> Any:
    """The model of an EAGLE drafter of that kind, with layers that add less, so that tokens repeat more often."""
    model = target_of(EAGLES[kind], path)
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.data *= 0.6
    return without_mask(model, path)


def without_mask(model: Any, path: Path) -> Any:
    """Write the model with a small embedding of the mask token: with a large one, every guess would be the mask."""
    model.get_input_embeddings().weight.data[MASK] *= 0.02
    model.save_pretrained(path)
    return model


def save_dflash(drafter: Drafter, target: Any, path: Path, seed: int = 3) -> None:
    """Write a drafter for transformers' model `target`: random, but with a tendency to guess earlier tokens."""
    source, width = torch.Generator().manual_seed(seed), 4 * HEAD

    def matrix(n: int, k: int, scale: float = 0.05) -> torch.Tensor:
        return scale * torch.randn(n, k, generator=source)

    def norm(n: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(n, generator=source)

    taps = len(drafter.taps)
    narrow = torch.linalg.qr(matrix(64, 2 * HEAD)).Q.T.contiguous()
    wide = torch.cat(
        [narrow[:HEAD]] * 2 + [narrow[HEAD:]] * 2
    ).T.contiguous()  # two query heads for each head of the keys
    tensors = {
        "fc.weight": torch.cat([torch.eye(64)] * taps, 1) / taps + matrix(64, 64 * taps, 0.02),
        "hidden_norm.weight": norm(64),
        "norm.weight": norm(64),
    }
    for i in range(len(drafter.kinds)):
        own = {
            "self_attn.q_proj.weight": matrix(width, 64), "self_attn.k_proj.weight": matrix(2 * HEAD, 64),
            "self_attn.v_proj.weight": narrow + matrix(2 * HEAD, 64, 0.02),
            "self_attn.o_proj.weight": wide + matrix(64, width, 0.02),
            # large queries: else each token of a block sees about the mean of the text
            "self_attn.q_norm.weight": 3 * norm(HEAD), "self_attn.k_norm.weight": norm(HEAD),
            "mlp.gate_proj.weight": matrix(96, 64), "mlp.up_proj.weight": matrix(96, 64),
            "mlp.down_proj.weight": matrix(64, 96), "input_layernorm.weight": norm(64),
            "post_attention_layernorm.weight": norm(64),
        }  # fmt: skip
        tensors |= {f"layers.{i}.{name}": value for name, value in own.items()}
    if not drafter.zlab:
        tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
        tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config_of(drafter, target.config), indent=1))


@dataclass
class Reference:
    """z-lab's forward (dflash/model.py of 2026) in float32, for one sequence and without a cache, or transformers' own
    generator with its class. target: transformers' model. path: the drafter's directory."""

    drafter: Drafter
    target: Any
    path: Path

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """The drafter's tensors, by z-lab's names."""
        return load_file(self.path / "model.safetensors")

    def chain(self, text: list[int], count: int) -> list[int]:
        """The first `count` guesses of a block after a text."""
        with torch.no_grad():
            read = self.target(input_ids=torch.tensor([text[:-1]]), output_hidden_states=True)
            guess = self.by_zlab if self.drafter.zlab else self.by_transformers
            return guess(text, read)[:count]

    def by_transformers(self, text: list[int], read: Any) -> list[int]:
        """The guesses of transformers' `DFlashTokenCandidateGenerator`."""
        from transformers import GenerationConfig, MuseGlimmerAssistantModel
        from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

        model = MuseGlimmerAssistantModel.from_pretrained(self.path, dtype=torch.float32, attn_implementation="eager")
        parts = self.target.get_input_embeddings(), self.target.get_output_embeddings()
        found = DFlashTokenCandidateGenerator(model.eval(), *parts, GenerationConfig(max_length=512, do_sample=False))
        given = {"position_ids": torch.arange(len(text))[None], "attention_mask": None}
        candidates, _ = found.get_candidates(torch.tensor([text]), given, read, False, 0)
        return candidates[0, len(text) :].tolist()

    def by_zlab(self, text: list[int], read: Any) -> list[int]:
        """The guesses of z-lab's layers, written out."""
        taps = torch.cat([read.hidden_states[i + 1][0] for i in self.drafter.taps], -1)
        context = self.norm(taps @ self.weights["fc.weight"].T, "hidden_norm")
        block = torch.tensor([text[-1], *[MASK] * (BLOCK - 1)])
        x = self.target.get_input_embeddings().weight[block] * self.drafter.scale
        for i in range(len(self.drafter.kinds)):
            x = x + self.attention(self.norm(x, f"layers.{i}.input_layernorm"), context, i)
            y, mlp = self.norm(x, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp."
            gate, up, down = (self.weights[f"{mlp}{n}_proj.weight"].T for n in ("gate", "up", "down"))
            x = x + (silu(y @ gate) * (y @ up)) @ down
        head = self.target.get_output_embeddings().weight
        return (self.norm(x[1:], "norm") @ head.T).argmax(-1).tolist()

    def attention(self, x: torch.Tensor, context: torch.Tensor, layer: int) -> torch.Tensor:
        """Queries of the block over keys and values of the context and the block."""
        name, both = f"layers.{layer}.self_attn.", torch.cat([context, x])
        q, k, v = (
            (rows @ self.weights[f"{name}{n}_proj.weight"].T).view(len(rows), -1, HEAD).transpose(0, 1)
            for n, rows in (("q", x), ("k", both), ("v", both))
        )
        q, k = self.norm(q, f"{name}q_norm"), self.norm(k, f"{name}k_norm")
        angles = torch.arange(len(both))[:, None] * 10000.0 ** -(torch.arange(0, HEAD, 2) / HEAD)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def turned(t: torch.Tensor) -> torch.Tensor:
            half = torch.cat([-t[..., HEAD // 2 :], t[..., : HEAD // 2]], -1)
            return t * cos[-t.shape[1] :] + half * sin[-t.shape[1] :]

        k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (turned(k), v))
        scores = turned(q) @ k.transpose(1, 2) / HEAD**0.5
        scores = scores.masked_fill(~self.drafter.sees(layer, len(both)), float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
        return mixed @ self.weights[f"{name}o_proj.weight"].T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm with the weight of that name."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weights[f"{name}.weight"]
