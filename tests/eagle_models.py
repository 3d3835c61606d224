"""Tiny EAGLE-3 drafters in both published layouts, and the published forward written out."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import GQA, save_tiny

LAYERS = 6
IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Drafter:
    """A tiny drafter: its layout (`speculators` or SpecForge's), its taps as the layout counts them, its number of
    layers and of tokens, and the fields of the layout that are true."""

    speculators: bool
    taps: tuple[int, ...] | None = None
    layers: int = 1
    vocab: int | None = None
    flags: tuple[str, ...] = ()
    kind: str = "llama"
    own: tuple[str, ...] = ("lm_head",)

    def behind(self) -> list[int]:
        """The number of target layers before each tap; the default is what both projects choose for LAYERS."""
        return [2, LAYERS // 2, LAYERS - 3] if self.taps is None else [i + (not self.speculators) for i in self.taps]

    def norms(self) -> list[str]:
        """The norms before `fc`."""
        own = [f"fc_norm.{i}.weight" for i in range(len(self.behind()))] if "fc_norm" in self.flags else []
        return own + (["input_norm.weight"] if "norm_before_fc" in self.flags else [])


# One of each layout like published drafters, one with EAGLE-3.1's additions, and one with several layers.
CASES = {
    "specforge": Drafter(False, vocab=50),
    "specforge-3.1": Drafter(False, (0, 2, 3), vocab=50, flags=("fc_norm", "norm_output"), own=("lm_head",)),
    "speculators": Drafter(True, (1, 3, 4), vocab=60, flags=("norm_before_residual",), own=("lm_head", "embed_tokens")),
    "speculators-two_layers": Drafter(
        True, (1, 4), flags=("norm_before_fc", "norm_output"), kind="qwen3", layers=2, own=("lm_head", "embed_tokens")
    ),
}
TEXT = [1, 5, 9, 5, 9, 5, 7, 7, 30, 31, 32, 33, 90, 91, 90, 91, 60]


def target_of(drafter: Drafter, path: Path | None = None) -> Any:
    """transformers' model that a tiny drafter is for, written to `path`. Its layers add little to the embeddings, which
    are also its LM head: tokens tend to repeat, and drafters that add little guess this."""
    import transformers as t

    sizes = {**GQA, "num_hidden_layers": LAYERS, "tie_word_embeddings": True}
    config = t.Gemma2Config(**sizes, head_dim=16, sliding_window=8) if drafter.speculators else t.LlamaConfig(**sizes)
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny(config, Path(folder))
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.data *= 0.5
        model.save_pretrained(path or folder)
    return model


def layer_config(drafter: Drafter, target: Any) -> dict[str, Any]:
    """The configuration of the layers: two heads of keys, another width than the target's MLP."""
    return {
        "model_type": drafter.kind,
        "hidden_size": target.hidden_size,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": drafter.layers,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }


def config_of(drafter: Drafter, target: Any) -> dict[str, Any]:
    """config.json, with the fields that published ones have and that change nothing."""
    layer, vocab = layer_config(drafter, target), drafter.vocab or target.vocab_size
    own = {"draft_vocab_size": vocab, **dict.fromkeys(drafter.flags, True)}
    if drafter.speculators:
        taps = {} if drafter.taps is None else {IDS: list(drafter.taps)}
        made = {"algorithm": "eagle3", "verifier": {"name_or_path": "some/model", "architectures": ["X"]}}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": made,
            "speculators_version": "0.5.0",
            "transformer_layer_config": layer,
            "target_hidden_size": None,
            "torch_dtype": "bfloat16",
            **taps,
            **own,
        }
    nested = {} if drafter.taps is None else {"eagle_config": {IDS: list(drafter.taps), "use_aux_hidden_state": True}}
    trained = {"bos_token_id": 1, "tie_word_embeddings": False, "sliding_window": 512, "use_sliding_window": False}
    return {"architectures": ["LlamaForCausalLMEagle3"], "use_cache": True, **trained, **layer, **nested, **own}


def save_eagle(drafter: Drafter, target: Any, path: Path, seed: int = 3) -> None:
    """Write a random drafter for transformers' model `target`. It adds little to its inputs, and its embedding and LM
    head are close to the target's."""
    source, config = torch.Generator().manual_seed(seed), layer_config(drafter, target.config)
    hidden, mlp, wide = config["hidden_size"], config["intermediate_size"], 16 * 4

    def matrix(n: int, k: int, scale: float = 0.05) -> torch.Tensor:
        return scale * torch.randn(n, k, generator=source)

    def norm(n: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(n, generator=source)

    taps, vocab = len(drafter.behind()), drafter.vocab or config["vocab_size"]
    tensors = {"fc.weight": torch.cat([torch.eye(hidden)] * taps, 1) / taps + matrix(hidden, taps * hidden, 0.02)}
    for i in range(drafter.layers):
        inputs = hidden * (2 if i == 0 else 1)
        own = {f"self_attn.{n}_proj.weight": matrix(m, inputs) for n, m in (("q", wide), ("k", 32), ("v", 32))}
        own |= {"self_attn.o_proj.weight": matrix(hidden, wide), "mlp.down_proj.weight": matrix(hidden, mlp)}
        own |= {f"mlp.{n}_proj.weight": matrix(mlp, hidden) for n in ("gate", "up")}
        own |= {f"{n}_layernorm.weight": norm(hidden) for n in ("input", "post_attention")}
        if i == 0:
            own["hidden_norm.weight"] = norm(hidden)
        if drafter.kind == "qwen3":
            own |= {f"self_attn.{n}_norm.weight": norm(16) for n in "qk"}
        tensors |= {f"layers.{i}.{name}": value for name, value in own.items()}
    tensors["norm.weight"] = norm(hidden)
    tensors |= {name: norm(taps * hidden if name == "input_norm.weight" else hidden) for name in drafter.norms()}
    chosen = torch.randperm(config["vocab_size"], generator=source)[:vocab].sort().values
    parts = {
        "lm_head": target.get_output_embeddings().weight.detach()[chosen],
        "embed_tokens": target.get_input_embeddings().weight.detach(),
    }
    tensors |= {f"{part}.weight": parts[part] + matrix(*parts[part].shape, 0.02) for part in drafter.own}
    if drafter.vocab is not None:
        tensors["d2t"] = chosen - torch.arange(vocab)
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, chosen, True)
    path.mkdir(parents=True)
    stored = tensors if drafter.speculators else {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
    save_file(stored, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config_of(drafter, target.config), indent=1))


@dataclass
class Reference:
    """EAGLE-3's forward, as SafeAILab's, SpecForge's and speculators' code has it, in float32: one sequence, no cache.

    target: transformers' model. path: of the drafter.
    """

    drafter: Drafter
    target: Any
    path: Path

    def __post_init__(self) -> None:
        named = load_file(self.path / "model.safetensors")
        self.weights = {name.replace("midlayer.", "layers.0."): value.float() for name, value in named.items()}
        self.offsets = named.get("d2t")
        self.embedding = self.weights.get("embed_tokens.weight", self.target.get_input_embeddings().weight)
        self.head = self.weights.get("lm_head.weight")
        if self.head is None:
            rows = self.target.get_output_embeddings().weight
            self.head = rows if self.offsets is None else rows[self.tokens(torch.arange(len(self.offsets)))]

    def tokens(self, own: torch.Tensor) -> torch.Tensor:
        """The target's token ids for the drafter's."""
        return own if self.offsets is None else own + self.offsets[own]

    def chain(self, text: Sequence[int], count: int) -> list[int]:
        """The `count` guesses after a text: the next token, and those after it."""
        with torch.no_grad():
            states = self.target(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
            hidden = self.first(torch.cat([states[n][0, :-1] for n in self.drafter.behind()], -1))
            tokens = torch.tensor(text[1:])
            guesses: list[int] = []
            for _ in range(count):
                after = self.step(tokens, hidden)
                logits = self.norm(after[-1:], "norm") @ self.head.T
                guesses.append(int(self.tokens(logits.argmax(-1))))
                carried = self.norm(after[-1:], "norm") if "norm_output" in self.drafter.flags else after[-1:]
                tokens = torch.cat([tokens, torch.tensor(guesses[-1:])])
                hidden = torch.cat([hidden, carried])
        return guesses

    def first(self, taps: torch.Tensor) -> torch.Tensor:
        """The first hidden states [T, H] from the joined taps [T, taps * H]."""
        if "fc_norm" in self.drafter.flags:
            parts = taps.chunk(len(self.drafter.behind()), -1)
            taps = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        if "norm_before_fc" in self.drafter.flags:
            taps = self.norm(taps, "input_norm")
        return taps @ self.weights["fc.weight"].T

    def step(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states [T, H] after the layers, from tokens [T] and the hidden states [T, H] before them."""
        embedded = self.norm(self.embedding[tokens], "layers.0.input_layernorm")
        normed = self.norm(hidden, "layers.0.hidden_norm")
        x = normed if "norm_before_residual" in self.drafter.flags else hidden
        read = torch.cat([embedded, normed], -1)
        for i in range(self.drafter.layers):
            if i:
                read = self.norm(x, f"layers.{i}.input_layernorm")
            x = x + self.attention(read, f"layers.{i}.self_attn.")
            y, mlp = self.norm(x, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp."
            gate, up, down = (self.weights[f"{mlp}{n}_proj.weight"].T for n in ("gate", "up", "down"))
            x = x + (torch.nn.functional.silu(y @ gate) * (y @ up)) @ down
        return x

    def attention(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Causal attention with rotary positions, of heads of 16 elements."""
        q, k, v = ((x @ self.weights[f"{name}{n}_proj.weight"].T).view(len(x), -1, 16).transpose(0, 1) for n in "qkv")
        if self.drafter.kind == "qwen3":
            q, k = self.norm(q, f"{name}q_norm"), self.norm(k, f"{name}k_norm")
        angles = torch.arange(len(x))[:, None] * 10000.0 ** -(torch.arange(0, 16, 2) / 16)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k = (t * cos + torch.cat([-t[..., 8:], t[..., :8]], -1) * sin for t in (q, k))
        k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) / 4
        scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
        return mixed @ self.weights[f"{name}o_proj.weight"].T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm with the weight of that name."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weights[f"{name}.weight"]
