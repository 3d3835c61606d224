"""`icc train-heads`: Medusa heads on the hidden states of a frozen model (Medusa-1, Cai et al. 2024, section 2.2.1).

Head i reads the hidden state of token t and predicts token t + 2 + i; the model itself predicts t + 1. The loss is the
sum of the heads' cross-entropies, head i weighted by 0.8^i. A block starts as the identity, so that training starts
from the model's own prediction of the next token.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, silu

from ..errors import UsageError
from ..progress import Reporter
from .head_files import write_heads
from .hidden_states import HiddenStates, WindowOptions, cut_windows
from .train_options import TrainHeadsOptions

DECAY = 0.8
WARMUP = 0.03
TOP = 5  # accuracies are reported up to this rank
STATE = "training.pt"
SAVE_STEPS = 200


class TrainedHeads(nn.Module):
    """Heads of residual blocks over one hidden state, and their LM heads, shared or own. Parameters have their
    published names, with "_" for "."."""

    def __init__(self, options: TrainHeadsOptions, lm_head: Tensor) -> None:
        super().__init__()
        self._options, self._shared = options, lm_head
        width = lm_head.shape[1]
        for i in range(options.heads):
            for layer in range(options.layers):
                self._add(f"{i}.{layer}.linear.weight", torch.zeros(width, width))
                self._add(f"{i}.{layer}.linear.bias", torch.zeros(width))
            if options.own_lm_head:
                self._add(f"{i}.{options.layers}.weight", lm_head.clone())
            else:
                self._add(f"{i}.projection.weight", torch.eye(width))

    def _add(self, name: str, value: Tensor) -> None:
        self.register_parameter(name.replace(".", "_"), nn.Parameter(value))

    def tensors(self) -> dict[str, Tensor]:
        """The weights under their published names."""
        return {name.replace("_", "."): value for name, value in self.named_parameters()}

    def logits(self, head: int, hidden: Tensor) -> Tensor:
        """[..., vocab] of one head from [..., hidden]."""
        layers = self._options.layers
        for layer in range(layers):
            weight, bias = (self.get_parameter(f"{head}_{layer}_linear_{kind}") for kind in ("weight", "bias"))
            hidden = hidden + silu(linear(hidden, weight, bias))
        if self._options.own_lm_head:
            return linear(hidden, self.get_parameter(f"{head}_{layers}_weight"))
        return linear(linear(hidden, self.get_parameter(f"{head}_projection_weight")), self._shared)


def train_heads(options: TrainHeadsOptions, reporter: Reporter, windows: Tensor | None = None) -> list[list[float]]:
    """Train, write the heads, and return the held-out accuracy [head][rank]: the token is among the best rank + 1.

    `windows`, int64 [n, length], are used as they are instead of windows of the text.

    Raises IccError. What is computed on the way lies in the output directory until the end, so that the same command
    goes on after it was cut off, and gives the same heads as if it had not been.
    """
    model = load_model(options)
    bos = getattr(model.config, "bos_token_id", None)
    prompt = options.length // 4 if options.generate else 0
    window = WindowOptions(options.sequences, options.length, prompt, options.temperature, options.seed)
    with reporter.stage("text"):
        if windows is None:
            windows = cut_windows(options.model, options.text, bos if isinstance(bos, int) else None, window)
        states = HiddenStates(options.output, model, windows, window)
        states.fill(reporter.progress)
    heldout = max(1, states.count // 20)
    lm_head = model.get_output_embeddings().weight.detach().to(torch.float32)
    trainer = _Trainer(options, states, range(states.count - heldout), lm_head)
    with reporter.stage("train"):
        trainer.run(reporter)
    with reporter.stage("held out"):
        accuracy = evaluate(trainer.heads, states, range(states.count - heldout, states.count), options)
    config = {
        "medusa_num_heads": options.heads,
        "medusa_num_layers": options.layers,
        "hidden_size": lm_head.shape[1],
        "vocab_size": lm_head.shape[0],
        "heldout_accuracy": [[round(value, 4) for value in head] for head in accuracy],
    }
    write_heads(options.output, trainer.heads.tensors(), config)
    shutil.rmtree(states.directory)
    (options.output / STATE).unlink(missing_ok=True)
    return accuracy


def load_model(options: TrainHeadsOptions) -> Any:
    """The frozen model of transformers, in float32."""
    from transformers import AutoModelForCausalLM

    from ..frontend.source.source import open_source

    open_source(options.model)  # refuses in words what is no checkpoint
    torch.manual_seed(options.seed)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    return model.eval().requires_grad_(False).to(options.device)


class _Trainer:
    """Heads in training, and how far they are."""

    def __init__(self, options: TrainHeadsOptions, states: HiddenStates, chunks: range, lm_head: Tensor) -> None:
        if not len(chunks):
            raise UsageError(f"{options.text} is too short: one window in twenty is held out", "give a longer text")
        self.options, self.states, self.chunks = options, states, chunks
        self.heads = TrainedHeads(options, lm_head).to(options.device)
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), lr=options.rate, weight_decay=0.01)
        self.step = 0
        self.total = options.epochs * sum(1 for _ in states.batches(chunks, options.batch, 0))
        self._key = repr([asdict(options), states.directory.name])
        self._file = options.output / STATE
        if self._file.is_file():
            self._resume()

    def _resume(self) -> None:
        state = torch.load(self._file, weights_only=True)
        if state["key"] == self._key:  # else it is another training's
            self.step = state["step"]
            self.heads.load_state_dict(state["heads"])
            self.optimizer.load_state_dict(state["optimizer"])

    def run(self, reporter: Reporter) -> None:
        """Train to the end, saving now and then."""
        number, loss = 0, math.nan
        for epoch in range(self.options.epochs):
            for tokens, hidden in self.states.batches(self.chunks, self.options.batch, self.options.seed + epoch):
                number += 1
                if number <= self.step:
                    continue  # before the run was cut off
                value = self._update(tokens, hidden)
                loss = value if math.isnan(loss) else loss + 0.02 * (value - loss)
                reporter.progress(f"loss {loss:.3f}", self.step, self.total)
                if self.step % SAVE_STEPS == 0:
                    self._save()

    def _update(self, tokens: Tensor, hidden: Tensor) -> float:
        progress = self.step / self.total
        rate = self.options.rate * min(1.0, progress / WARMUP) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        tokens, hidden = tokens.to(self.options.device), hidden.to(self.options.device)
        total = 0.0
        for i in range(self.options.heads):  # one head at a time: its logits are the largest thing in memory
            with torch.autocast(self.options.device.split(":")[0], torch.bfloat16):
                logits = self.heads.logits(i, hidden[:, : -2 - i])
            loss = cross_entropy(logits.flatten(0, 1).float(), tokens[:, 2 + i :].flatten())
            (loss * DECAY**i).backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return total / self.options.heads

    def _save(self) -> None:
        state = {"key": self._key, "step": self.step, "heads": self.heads.state_dict()}
        partial = self._file.with_suffix(".partial")
        torch.save(state | {"optimizer": self.optimizer.state_dict()}, partial)
        partial.replace(self._file)


@torch.inference_mode()
def evaluate(heads: TrainedHeads, states: HiddenStates, chunks: range, options: TrainHeadsOptions) -> list[list[float]]:
    """Held-out accuracy [head][rank], over the tokens of the windows (the model's own where it wrote them)."""
    hits = torch.zeros(options.heads, TOP)
    counts = torch.zeros(options.heads)
    first = options.length // 4 if options.generate else 0
    for number in chunks:
        tokens, hidden = (value.to(options.device) for value in states.chunk(number))
        for i in range(options.heads):
            best = heads.logits(i, hidden[:, first : -2 - i].float()).topk(TOP).indices
            right = (best == tokens[:, first + 2 + i :, None]).cpu()
            hits[i] += right.cumsum(-1).sum((0, 1))
            counts[i] += right.shape[0] * right.shape[1]
    return (hits / counts[:, None]).tolist()
