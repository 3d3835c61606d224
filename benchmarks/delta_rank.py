"""How much of a fine-tune has low rank: would a delta engine that holds B and A instead of each matrix be exact?

    python benchmarks/delta_rank.py samples/pystd --text samples/pystd/heldout --steps 60

Fine-tunes a checkpoint twice on a text: by a merged LoRA of rank 8 in every linear layer, and in all weights; both are
rounded to 16 bits. For each rank it takes the best B A for the difference of every matrix, adds it to the base in
float32 and rounds to 16 bits. It prints the share of the difference's energy that is left out, the share of elements
that equal the fine-tune's, the bytes of B and A in 16 bits over those of the matrices in 16 and in 4 bits, and the mean
Kullback-Leibler divergence per token (nats) from the fine-tune. The last rows are for engines in 4 bits (rtn4, groups
of 64), which have no base in 16 bits: the quantized fine-tune, and B A added to the quantized base, quantized again.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from icc.compiler.weights.formats.registry import find_format
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

RANKS = (8, 16, 32, 64, 128)
LENGTH, BATCH = 128, 4
FOUR_BITS = find_format("q4g64")


def windows(path: Path, tokenizer: Any) -> Tensor:
    """Token ids [windows, LENGTH] of a text file, or of the files of a directory."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    text = "\n".join(file.read_text(errors="replace") for file in files if file.is_file())
    ids = torch.tensor(tokenizer(text)["input_ids"])
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def train(model: Any, data: Tensor, steps: int, rate: float) -> None:
    """Train in place by AdamW for `steps` batches of windows, in order."""
    parameters = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.0)
    for step in range(steps):
        rows = data[[(step * BATCH + number) % len(data) for number in range(BATCH)]]
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fine_tunes(base: Any, data: Tensor, steps: int) -> Iterator[tuple[str, Any]]:
    """Yield (name, model) of both fine-tunes; weights are float32 with bfloat16 values."""
    adapted = get_peft_model(copy.deepcopy(base), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    train(adapted, data, steps, 1e-3)
    yield "LoRA of rank 8, merged", rounded(adapted.merge_and_unload())
    whole = copy.deepcopy(base)
    train(whole, data, steps, 1e-4)
    yield "all weights", rounded(whole)


def rounded(model: Any) -> Any:
    """The model, its parameters rounded in place to bfloat16 values."""
    for value in model.parameters():
        value.data = value.data.to(torch.bfloat16).float()
    return model


def matrices(model: Any) -> dict[str, Tensor]:
    """The weights of the linear layers except the head, by name."""
    return {
        f"{name}.weight": module.weight.data
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name
    }


def quantized(weight: Tensor) -> Tensor:
    """The values of a weight that was rounded to 4 bits."""
    form = FOUR_BITS.fitted(weight.shape[1])
    return form.decode(form.encode(weight).parts)


def with_matrices(model: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """A copy of the model, each matrix replaced by `change(name, value)`."""
    other = copy.deepcopy(model)
    for name, value in matrices(other).items():
        value.copy_(change(name, value))
    return other


@torch.no_grad()
def log_probabilities(model: Any, data: Tensor) -> Tensor:
    return torch.cat([model(input_ids=rows).logits.log_softmax(-1) for rows in data.split(BATCH)])


def divergence(expected: Tensor, model: Any, data: Tensor) -> float:
    """Mean KL divergence per token, in nats, of a model from `expected` log-probabilities."""
    found = log_probabilities(model, data)
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def rows(base: Any, tuned: Any, data: Tensor) -> Iterator[str]:
    """The line of the base, a line for each rank, then the lines of 4-bit engines."""
    old, new = matrices(base), matrices(tuned)
    expected = log_probabilities(tuned, data)
    parts = {name: torch.linalg.svd(new[name] - old[name], full_matrices=False) for name in new}
    energy = sum(float((s * s).sum()) for _, s, _ in parts.values())
    size = sum(value.numel() for value in new.values())

    def low(name: str, rank: int) -> Tensor:
        u, s, v = parts[name]
        return (u[:, :rank] * s[:rank]).bfloat16().float() @ v[:rank].bfloat16().float()

    yield f"  the base itself: KL {divergence(expected, base, data):.1e}"
    for rank in RANKS:
        near = {name: (old[name] + low(name, rank)).bfloat16().float() for name in new}
        left = sum(float((s[rank:] ** 2).sum()) for _, s, _ in parts.values()) / energy
        equal = sum(int((near[name] == new[name]).sum()) for name in new) / size
        held = sum(rank * sum(value.shape) for value in new.values())
        kl = divergence(expected, with_matrices(tuned, lambda name, _, near=near: near[name]), data)
        share = f"{held / size:.2f} of 16 bits, {held * 16 / (size * 4.25):.2f} of 4"
        yield f"  rank {rank:3}: energy left out {left:.3f}, elements equal {equal:.3f}, bytes {share}, KL {kl:.1e}"
    kl = divergence(expected, with_matrices(tuned, lambda _, value: quantized(value)), data)
    yield f"  4 bits, whole: KL {kl:.1e}"
    for rank in RANKS[:3]:
        twice = with_matrices(tuned, lambda name, _, rank=rank: quantized(quantized(old[name]) + low(name, rank)))
        yield f"  4 bits, the quantized base and rank {rank}, quantized: KL {divergence(expected, twice, data):.1e}"


def main() -> None:
    """Print a block per fine-tune."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--windows", type=int, default=16, help="number of windows of the text for KL; training uses the others"
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    data = windows(given.text, AutoTokenizer.from_pretrained(given.model))
    held, training = data[: given.windows], data[given.windows :]
    for name, tuned in fine_tunes(base, training, given.steps):
        print(f"{name}, {given.steps} steps", flush=True)
        for line in rows(base, tuned, held):
            print(line, flush=True)


if __name__ == "__main__":
    main()
