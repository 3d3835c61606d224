"""Shared by all kinds of `icc train-heads`: the frozen model, and a training that can be interrupted."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ...runtime.format.isa import cpu_flags
from ..errors import UsageError
from ..progress import Reporter
from .hidden_states import HiddenStates, Read, WindowOptions, cut_windows
from .train_options import TrainHeadsOptions

WARMUP = 0.03
TOP = 5  # accuracies are reported up to this rank
DECAY = 0.8  # ratio of the loss weights of consecutive guesses
STATE = "training.pt"
SAVE_STEPS = 200
CPU_HAS_BF16 = not cpu_flags().isdisjoint({"avx512_bf16", "amx_bf16"})  # instructions for products of bf16


def load_model(options: TrainHeadsOptions) -> Any:
    """The frozen model of transformers, in float32."""
    from transformers import AutoModelForCausalLM

    from ..frontend.source.source import open_source

    open_source(options.model)  # raises a plain error if it is no checkpoint
    torch.manual_seed(options.seed)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    return model.eval().requires_grad_(False).to(options.device)


def read_states(
    options: TrainHeadsOptions, model: Any, reporter: Reporter, windows: Tensor | None, read: Read
) -> HiddenStates:
    """The results of `read` for the model on `windows` [n, length]; None: on windows of the text. Only missing chunks
    are computed."""
    bos = getattr(model.config, "bos_token_id", None)
    prompt = options.length // 4 if options.generate else 0
    window = WindowOptions(options.sequences, options.length, prompt, options.temperature, options.seed)
    with reporter.stage("text"):
        if windows is None:
            windows = cut_windows(options.model, options.text, bos if isinstance(bos, int) else None, window)
        states = HiddenStates(options.output, model, windows, window, read)
        states.fill(reporter.progress)
    return states


def split(states: HiddenStates) -> tuple[range, range]:
    """The chunks for training, and the held-out chunks: one in twenty, at least one."""
    heldout = max(1, states.count // 20)
    return range(states.count - heldout), range(states.count - heldout, states.count)


def precision(device: str) -> torch.autocast:
    """The context of a training's products on a torch device: bf16, or float32 on CPUs without bf16 instructions, which
    are about twenty times slower in bf16."""
    kind = device.split(":")[0]
    return torch.autocast(kind, torch.bfloat16, enabled=kind != "cpu" or CPU_HAS_BF16)


def write_trained(states: HiddenStates, tensors: Mapping[str, Tensor], config: dict[str, Any], files: Files) -> None:
    """Write the trained tensors, in bf16, and their configuration, and remove what only the training needs."""
    stored = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in tensors.items()}
    partial = files.tensors.with_name(f"{files.tensors.name}.partial")
    save_file(stored, partial, metadata={"format": "pt"})
    files.config.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(files.tensors)
    shutil.rmtree(states.directory)
    (files.tensors.parent / STATE).unlink(missing_ok=True)


class Files(NamedTuple):
    """The files of what was trained, both in the output directory."""

    tensors: Path
    config: Path


class Guesser(Protocol):
    """The module that is trained.

    tokens: int64 [n, length]. values: the stored values of the model for each token, bf16 [n, length, width]."""

    def backward(self, tokens: Tensor, values: Tensor) -> float:
        """Add the gradients of the loss of these windows, and return the unweighted mean loss per guess. For shapes see
        `Guesser`."""
        ...


class Trainer:
    """A training: the module, the optimizer, and the number of steps done."""

    def __init__(self, options: TrainHeadsOptions, states: HiddenStates, chunks: range, module: nn.Module) -> None:
        if not len(chunks):
            raise UsageError(f"{options.text} is too short: one window in twenty is held out", "give a longer text")
        self.options, self.states, self.chunks = options, states, chunks
        self.module = module.to(options.device)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=options.rate, weight_decay=0.01)
        self.step = 0
        self.total = options.epochs * sum(1 for _ in states.batches(chunks, options.batch, 0))
        self._key = repr([asdict(options), states.directory.name])
        self._file = options.output / STATE
        if self._file.is_file():
            self._resume()

    def _resume(self) -> None:
        state = torch.load(self._file, weights_only=True)
        if state["key"] == self._key:  # else the file belongs to another training
            self.step = state["step"]
            self.module.load_state_dict(state["module"])
            self.optimizer.load_state_dict(state["optimizer"])

    def run(self, reporter: Reporter) -> None:
        """Train to the end, and save the state every SAVE_STEPS steps."""
        number, loss = 0, math.nan
        for epoch in range(self.options.epochs):
            for tokens, hidden in self.states.batches(self.chunks, self.options.batch, self.options.seed + epoch):
                number += 1
                if number <= self.step:
                    continue  # done before the interruption
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
        loss = cast(Guesser, self.module).backward(tokens, hidden)
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss

    def _save(self) -> None:
        state = {"key": self._key, "step": self.step, "module": self.module.state_dict()}
        partial = self._file.with_suffix(".partial")
        torch.save(state | {"optimizer": self.optimizer.state_dict()}, partial)
        partial.replace(self._file)
