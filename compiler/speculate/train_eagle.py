"""`icc train-heads --kind eagle3`: trains a small EAGLE-3 drafter (Li et al. 2025) for a frozen model, in SpecForge's
layout.

One decoder layer of Llama's form reads, for token t, the embedding of token t + 1 and `fc` of the model's hidden states
of token t, and predicts token t + 2 through the model's own LM head. It is trained as it is used (training-time test,
section 3.2): in pass j it reads its own hidden state of pass j - 1 in place of the model's, one token later, and
attends to the keys of pass 0 up to its position and to its own keys of the later passes. The loss is the sum of the
passes' cross-entropies, pass j weighted by 0.8^j.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, rms_norm, silu

from ..errors import UsageError
from ..progress import Reporter
from .hidden_states import HiddenStates, tapped_states, taps_of
from .train_options import TrainHeadsOptions
from .trainer import DECAY, TOP, Files, Trainer, load_model, precision, read_states, split, write_trained

EPS, THETA = 1e-5, 10000.0
FILE = "model.safetensors"


class EagleLayer(nn.Module):
    """The drafter. Parameters have SpecForge's names, with "-" for "."; the embedding and the LM head are the
    model's."""

    def __init__(self, options: TrainHeadsOptions, model: Any) -> None:
        super().__init__()
        config = model.config.get_text_config()
        self.options, self.width = options, config.hidden_size
        self.heads = config.num_attention_heads
        self.groups = getattr(config, "num_key_value_heads", None) or self.heads
        self.dim = getattr(config, "head_dim", None) or self.width // self.heads
        self.inner = getattr(config, "intermediate_size", None) or 4 * self.width
        self.taps = taps_of(config.num_hidden_layers)
        self._embedding = model.get_input_embeddings().weight.detach().float()
        self._lm_head = model.get_output_embeddings().weight.detach().float()
        source = torch.Generator().manual_seed(options.seed)
        for name, shape in self._shapes().items():
            if len(shape) == 1:
                value = torch.ones(shape)
            elif name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
                value = torch.zeros(shape)  # the layer starts as the identity
            else:
                value = torch.randn(shape, generator=source) * shape[1] ** -0.5
            self.register_parameter(name.replace(".", "-"), nn.Parameter(value))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        wide, kv = self.heads * self.dim, self.groups * self.dim
        norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
        products = {
            "q_proj": (wide, 2 * self.width), "k_proj": (kv, 2 * self.width), "v_proj": (kv, 2 * self.width),
            "o_proj": (self.width, wide),
        }  # fmt: skip
        mlp = {"gate_proj": (self.inner, self.width), "up_proj": (self.inner, self.width)}
        mlp["down_proj"] = (self.width, self.inner)
        found: dict[str, tuple[int, ...]] = {"fc.weight": (self.width, len(self.taps) * self.width)}
        found |= {f"{name}.weight": (self.width,) for name in norms}
        found |= {f"midlayer.self_attn.{name}.weight": shape for name, shape in products.items()}
        return found | {f"midlayer.mlp.{name}.weight": shape for name, shape in mlp.items()}

    def tensors(self) -> dict[str, Tensor]:
        """The weights under their published names."""
        return {name.replace("-", "."): value for name, value in self.named_parameters()}

    def _weight(self, name: str) -> Tensor:
        return self.get_parameter(f"{name}.weight".replace(".", "-"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x.float(), (self.width,), self._weight(name), EPS)

    def passes(self, tokens: Tensor, taps: Tensor, count: int) -> list[Tensor]:
        """The logits [n, rows, vocab] of each of `count` passes, for the rows whose tokens all exist: row t of pass j
        predicts token t + 2 + j. tokens: int64 [n, length]; taps: [n, length, taps * H]."""
        rows = tokens.shape[1] - 1 - count
        hidden = linear(taps[:, :rows].to(self._weight("fc").dtype), self._weight("fc"))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found: list[Tensor] = []
        for ahead in range(count):
            hidden = self._layer(tokens[:, 1 + ahead : 1 + ahead + rows], hidden, ahead, keys, values)
            found.append(linear(self._norm(hidden, "norm"), self._lm_head.to(hidden.device)))
        return found

    def _layer(self, tokens: Tensor, hidden: Tensor, ahead: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """One pass: the hidden states [n, rows, H] after the layer. keys, values: those of earlier passes; this pass's
        are appended."""
        embedded = self._embedding.to(hidden.device)[tokens]
        normed = self._norm(hidden, "midlayer.hidden_norm")
        x = torch.cat([self._norm(embedded, "midlayer.input_layernorm"), normed], -1)
        hidden = hidden + self._attention(x, ahead, keys, values)
        x = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = (linear(x, self._weight(f"midlayer.mlp.{name}_proj")) for name in ("gate", "up"))
        return hidden + linear(silu(gate) * up, self._weight("midlayer.mlp.down_proj"))

    def _attention(self, x: Tensor, ahead: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        rows, each = x.shape[1], self.heads // self.groups
        q, k, v = (
            linear(x, self._weight(f"midlayer.self_attn.{n}_proj")).unflatten(-1, (-1, self.dim)).transpose(1, 2)
            for n in "qkv"
        )
        places = torch.arange(ahead, ahead + rows, device=x.device)
        q, k = _turned(q, places), _turned(k, places)
        keys.append(k.repeat_interleave(each, 1))
        values.append(v.repeat_interleave(each, 1))
        later = torch.ones(rows, rows, dtype=torch.bool, device=x.device).triu(1)
        scores = [(q @ keys[0].mT).masked_fill(later, float("-inf"))]
        scores += [(q * own).sum(-1, keepdim=True) for own in keys[1:]]
        weights = (torch.cat(scores, -1) * self.dim**-0.5).softmax(-1)
        mixed = weights[..., :rows] @ values[0]
        for number, own in enumerate(values[1:]):
            mixed = mixed + weights[..., rows + number, None] * own
        return linear(mixed.transpose(1, 2).flatten(2), self._weight("midlayer.self_attn.o_proj"))

    def backward(self, tokens: Tensor, taps: Tensor) -> float:
        """See `Guesser`."""
        count, losses = self.options.heads, list[Tensor]()
        with precision(self.options.device):
            found = self.passes(tokens, taps, count)
        for ahead, logits in enumerate(found):
            wanted = tokens[:, 2 + ahead : 2 + ahead + logits.shape[1]]
            losses.append(cross_entropy(logits.flatten(0, 1).float(), wanted.flatten()))
        sum((loss * DECAY**ahead for ahead, loss in enumerate(losses)), torch.zeros(())).backward()
        return sum(loss.item() for loss in losses) / count

    def config(self, target: Any) -> dict[str, Any]:
        """The content of config.json, given the target model's configuration."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "head_dim": self.dim,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "vocab_size": self._lm_head.shape[0],
            "draft_vocab_size": self._lm_head.shape[0],
            "max_position_embeddings": target.max_position_embeddings,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "tie_word_embeddings": False,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in self.taps],
                "use_aux_hidden_state": True,
            },
        }


def _turned(x: Tensor, places: Tensor) -> Tensor:
    """Queries or keys [n, heads, rows, dim], rotated by positions `places` [rows]; a pair is an element of each half of
    a head."""
    half = x.shape[-1] // 2
    angles = places[:, None] * THETA ** -(torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def train_eagle(options: TrainHeadsOptions, reporter: Reporter, windows: Tensor | None = None) -> list[list[float]]:
    """Train, write the drafter, and return the held-out accuracy [pass][rank]; see `train_heads`. UsageError for a
    model of one layer."""
    model = load_model(options)
    if model.config.get_text_config().num_hidden_layers < 2:
        raise UsageError(f"{options.model} has one layer: EAGLE-3 reads between layers", "train --kind medusa")
    states = read_states(options, model, reporter, windows, tapped_states)
    trained, heldout = split(states)
    layer = EagleLayer(options, model)
    with reporter.stage("train"):
        Trainer(options, states, trained, layer).run(reporter)
    with reporter.stage("held out"):
        accuracy = _evaluate(layer, states, heldout)
    config = layer.config(model.config.get_text_config())
    write_trained(states, layer.tensors(), config, Files(options.output / FILE, options.output / "config.json"))
    return accuracy


@torch.inference_mode()
def _evaluate(layer: EagleLayer, states: HiddenStates, chunks: range) -> list[list[float]]:
    """The held-out accuracy [pass][rank], over the tokens of the windows (only the model's own, if it wrote them)."""
    count = layer.options.heads
    first = layer.options.length // 4 if layer.options.generate else 0
    hits, total = torch.zeros(count, TOP), 0
    for number in chunks:
        tokens, taps = (value.to(layer.options.device) for value in states.chunk(number))
        for ahead, logits in enumerate(layer.passes(tokens, taps.float(), count)):
            best = logits[:, first:].topk(TOP).indices
            wanted = tokens[:, 2 + ahead + first : 2 + ahead + logits.shape[1], None]
            hits[ahead] += (best == wanted).cumsum(-1).sum((0, 1)).cpu()
        total += tokens.shape[0] * (tokens.shape[1] - 1 - count - first)
    return (hits / total).tolist()
