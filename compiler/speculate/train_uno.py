"""`icc train-heads --kind uno`: trains the adapter (LoRA) with which a frozen model guesses several tokens in one step
(UNO, see runtime/speculate/uno.py).

Rows of random tokens follow a text whose last token is t. The adapter is active in these rows alone, and row i, from 0,
learns to predict token t + 2 + i of the text; the model itself predicts t + 1. The loss is the sum of the rows'
cross-entropies, row i weighted by 0.8^i. The rows attend to the text's keys and values, which the adapter does not
change, and to the rows before them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from ...runtime.adapters.config import CONFIG_FILE
from ...runtime.adapters.reader import WEIGHTS_FILE
from ..errors import UsageError
from ..progress import Reporter
from .hidden_states import HiddenStates
from .train_options import TrainHeadsOptions
from .trainer import DECAY, TOP, Files, Trainer, load_model, precision, read_states, split, write_trained

PLACES = 8  # places of a window from which tokens are guessed in a training step
_ROUTERS = ("gate", "router")  # ends of names of layers that choose experts


class UnoAdapter(nn.Module):
    """A LoRA of the model's linear layers but the LM head and routers. Parameters have PEFT's names, with "-" for
    "."."""

    def __init__(self, options: TrainHeadsOptions, model: Any) -> None:
        super().__init__()
        self.options, self._model, self._active = options, [model], False  # in a list: not a part of this module
        self.vocab_size, self.layers = model.get_input_embeddings().weight.shape[0], dict(_layers(model))
        source = torch.Generator().manual_seed(options.seed)
        for name, (layer, k, n) in self.layers.items():
            a = torch.randn((options.rank, k), generator=source) * k**-0.5
            self.register_parameter(_key(name, "A"), nn.Parameter(a))
            self.register_parameter(_key(name, "B"), nn.Parameter(torch.zeros(n, options.rank)))
            layer.register_forward_hook(partial(self._add, name))

    def _add(self, name: str, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not self._active:
            return None
        a, b = (self.get_parameter(_key(name, kind)) for kind in "AB")
        return output + linear(linear(args[0], a), b)

    def tensors(self) -> dict[str, Tensor]:
        """The weights under PEFT's names."""
        return {f"base_model.model.{name.replace('-', '.')}": value for name, value in self.named_parameters()}

    def guesses(self, tokens: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For PLACES places of the windows, at random by the seed: the logits [n, heads, vocab] of the rows of noise,
        and the tokens [n, heads] that come there. tokens: int64 [n, length]."""
        model, heads, (count, length) = self._model[0], self.options.heads, tokens.shape
        source = torch.Generator().manual_seed(seed)
        first, last = length // 4 if self.options.generate else 0, length - 2 - heads
        with torch.no_grad(), precision(self.options.device):
            text = model(input_ids=tokens, use_cache=True).past_key_values
        for place in torch.randint(first, last + 1, (PLACES,), generator=source).tolist():
            noise = torch.randint(self.vocab_size, (count, heads), generator=source).to(tokens.device)
            cache = _shortened(text, length - place - 1)
            self._active = True
            try:
                with precision(self.options.device):
                    logits = model(input_ids=noise, past_key_values=cache, use_cache=True).logits.float()
            finally:
                self._active = False
            yield logits, tokens[:, place + 2 : place + 2 + heads]

    def backward(self, tokens: Tensor, values: Tensor) -> float:
        """See `Guesser`; `values` are not used."""
        mean = 0.0
        for logits, wanted in self.guesses(tokens, self.options.seed + int(tokens.sum())):
            losses = [cross_entropy(logits[:, row], wanted[:, row]) for row in range(self.options.heads)]
            total = sum((loss * DECAY**row for row, loss in enumerate(losses)), torch.zeros(()))
            (total / PLACES).backward()
            mean += sum(loss.item() for loss in losses) / len(losses) / PLACES
        return mean

    def config(self) -> dict[str, Any]:
        """The content of adapter_config.json."""
        transposed = any(not isinstance(layer, nn.Linear) for layer, _, _ in self.layers.values())
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self.options.model),
            "r": self.options.rank,
            "lora_alpha": self.options.rank,
            "target_modules": sorted(self.layers),
            "fan_in_fan_out": transposed,
            "bias": "none",
            "inference_mode": True,
        }


def _key(name: str, kind: str) -> str:
    return f"{name}.lora_{kind}.weight".replace(".", "-")


def _layers(model: Any) -> Iterator[tuple[str, tuple[nn.Module, int, int]]]:
    """The linear layers that the adapter changes, by name, each with its numbers of inputs and outputs."""
    from transformers.pytorch_utils import Conv1D

    for name, module in model.named_modules():
        if module is model.get_output_embeddings() or name.rpartition(".")[2] in _ROUTERS:
            continue
        if isinstance(module, nn.Linear):
            yield name, (module, module.in_features, module.out_features)
        elif isinstance(module, Conv1D):
            yield name, (module, module.nx, module.nf)


def _shortened(cache: Any, count: int) -> Any:
    """A copy of the keys and values without the last `count` tokens. UsageError if the model does not keep them."""
    found = copy.deepcopy(cache)
    try:
        found.crop(-count)
    except (AttributeError, NotImplementedError, ValueError) as error:
        raise UsageError("--kind uno needs a model that keeps the keys and values of every token", str(error)) from None
    return found


def train_uno(options: TrainHeadsOptions, reporter: Reporter, windows: Tensor | None = None) -> list[list[float]]:
    """Train, write the adapter in PEFT's form, and return the held-out accuracy [row][rank]; see `train_heads`.
    UsageError for a model whose state cannot be taken back."""
    model = load_model(options)
    states = read_states(options, model, reporter, windows, no_states)
    trained, heldout = split(states)
    adapter = UnoAdapter(options, model)
    with reporter.stage("train"):
        Trainer(options, states, trained, adapter).run(reporter)
    with reporter.stage("held out"):
        accuracy = _evaluate(adapter, states, heldout)
    files = Files(options.output / WEIGHTS_FILE, options.output / CONFIG_FILE)
    write_trained(states, adapter.tensors(), adapter.config(), files)
    return accuracy


def no_states(model: Any, windows: Tensor) -> Tensor:
    """Nothing to store for the windows [n, length]: [n, length, 0]."""
    return torch.zeros(*windows.shape, 0)


@torch.no_grad()
def _evaluate(adapter: UnoAdapter, states: HiddenStates, chunks: range) -> list[list[float]]:
    """The held-out accuracy [row][rank] at PLACES places of each window."""
    hits, total = torch.zeros(adapter.options.heads, TOP), 0
    for number in chunks:
        tokens = states.chunk(number)[0].to(adapter.options.device)
        for logits, wanted in adapter.guesses(tokens, number):
            best = logits.topk(TOP).indices
            hits += (best == wanted[..., None]).cumsum(-1).sum(0).cpu()
            total += len(tokens)
    return (hits / total).tolist()
