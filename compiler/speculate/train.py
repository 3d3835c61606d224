"""`icc train-heads`: trains Medusa heads on the hidden states of a frozen model (Medusa-1, Cai et al. 2024, section
2.2.1).

Head i reads the hidden state of token t and predicts token t + 2 + i; the model itself predicts t + 1. The loss is the
sum of the heads' cross-entropies, head i weighted by 0.8^i. A block starts as the identity, so that training starts
from the model's own prediction of the next token.
"""

from __future__ import annotations

import shutil

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, silu

from ..progress import Reporter
from .head_files import write_heads
from .hidden_states import HiddenStates, hidden_states
from .train_options import TrainHeadsOptions
from .trainer import DECAY, STATE, TOP, Trainer, load_model, precision, read_states, split


class TrainedHeads(nn.Module):
    """Heads of residual blocks over one hidden state, with a shared LM head or one each. Parameters have their
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
        """The logits [..., vocab] of one head for hidden states [..., hidden]."""
        layers = self._options.layers
        for layer in range(layers):
            weight, bias = (self.get_parameter(f"{head}_{layer}_linear_{kind}") for kind in ("weight", "bias"))
            hidden = hidden + silu(linear(hidden, weight, bias))
        if self._options.own_lm_head:
            return linear(hidden, self.get_parameter(f"{head}_{layers}_weight"))
        return linear(linear(hidden, self.get_parameter(f"{head}_projection_weight")), self._shared)

    def backward(self, tokens: Tensor, hidden: Tensor) -> float:
        """See `Guesser`."""
        total = 0.0
        for i in range(self._options.heads):  # one head at a time: its logits are the largest thing in memory
            with precision(self._options.device):
                logits = self.logits(i, hidden[:, : -2 - i].float())
            loss = cross_entropy(logits.flatten(0, 1).float(), tokens[:, 2 + i :].flatten())
            (loss * DECAY**i).backward()
            total += loss.item()
        return total / self._options.heads


def train_heads(options: TrainHeadsOptions, reporter: Reporter, windows: Tensor | None = None) -> list[list[float]]:
    """Train, write the heads, and return the held-out accuracy [head][rank]: how often the token is among the best rank
    + 1.

    windows: int64 [n, length], used instead of windows of the text; None: windows of the text.

    Raises IccError. Intermediate results are kept in the output directory until the end, so that the same command
    continues an interrupted run, with the same heads as result.
    """
    model = load_model(options)
    states = read_states(options, model, reporter, windows, hidden_states)
    trained, heldout = split(states)
    lm_head = model.get_output_embeddings().weight.detach().to(torch.float32)
    heads = TrainedHeads(options, lm_head)
    trainer = Trainer(options, states, trained, heads)
    with reporter.stage("train"):
        trainer.run(reporter)
    with reporter.stage("held out"):
        accuracy = evaluate(heads, states, heldout, options)
    config = {
        "medusa_num_heads": options.heads,
        "medusa_num_layers": options.layers,
        "hidden_size": lm_head.shape[1],
        "vocab_size": lm_head.shape[0],
        "heldout_accuracy": [[round(value, 4) for value in head] for head in accuracy],
    }
    write_heads(options.output, heads.tensors(), config)
    shutil.rmtree(states.directory)
    (options.output / STATE).unlink(missing_ok=True)
    return accuracy


@torch.inference_mode()
def evaluate(heads: TrainedHeads, states: HiddenStates, chunks: range, options: TrainHeadsOptions) -> list[list[float]]:
    """The held-out accuracy [head][rank], over the tokens of the windows (only the model's own, if it wrote them)."""
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
