"""Which numbers in a text `snapkv` and `h2o` keep, by transformers: a control that shares no code with eviction.py.

`python benchmarks/eviction_control.py FOLDER FILE.gguf --text FOLDER` (needs accelerate, to read GGUF). One prompt is
read whole, by attention that keeps its keys, values and weights; each policy then chooses among them, and the answer
is checked token by token. Pooling takes a maximum over 1, 7 or 15 tokens; the papers use widths 5 and 7.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

CONTEXT, RECENT = 1024, 32
Layers = dict[int, tuple[Tensor, Tensor, Tensor, Tensor]]  # k, v [H, T, D]; weights [H, T] of last, all queries


class Attention:
    """Attention that reads a prompt and keeps its keys and values, or continues from the chosen ones."""

    def __init__(self) -> None:
        self.layers: Layers = {}
        self.chosen: dict[int, Tensor] | None = None

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        before = 0
        if self.chosen is not None:
            held = self.layers[module.layer_idx][:2]
            places = self.chosen[module.layer_idx][..., None].expand(-1, -1, k.shape[-1])
            k, v = (torch.cat([x.gather(1, places)[None], new], 2) for x, new in zip(held, (k, v), strict=True))
            before = places.shape[1]
        heads, group, tokens = k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
        scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * scaling
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        scores[..., before:] = scores[..., before:].masked_fill(hidden, -torch.inf)
        weights = scores.softmax(-1)
        if self.chosen is None:
            given = weights[0].view(heads, group, tokens, tokens)
            self.layers[module.layer_idx] = (k[0], v[0], given[:, :, -RECENT:].sum((1, 2)), given.sum((1, 2)))
        return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None

    def choose(self, policy: str, budget: int, width: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (layer, the positions that every head keeps [H, n])."""
        for layer, (k, _, last, total) in self.layers.items():
            heads, tokens, _ = k.shape
            recent = RECENT if policy == "snapkv" else budget // 4
            marks = (last if policy == "snapkv" else total)[:, : tokens - recent]
            if width > 1:
                marks = max_pool1d(marks[None], width, 1, width // 2)[0]
            best = marks.topk(budget - recent).indices.sort().values
            yield layer, torch.cat([best, torch.arange(tokens - recent, tokens).expand(heads, -1)], 1)


def main() -> None:
    """Print one row per policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--needles", type=int, default=5)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.folder, gguf_file=options.file)
    model: Any = AutoModelForCausalLM.from_pretrained(options.folder, gguf_file=options.file, dtype=torch.float32)
    attention = Attention()
    AttentionInterface.register("kept", attention)
    model.set_attn_implementation("kept")

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(options.text.glob("*.md")))
    filler, source = tokens(text)[CONTEXT:], random.Random(0)
    found: dict[tuple[str, int, int], int] = {}
    for needle in range(options.needles):
        number = str(source.randrange(10_000, 99_999))
        told = tokens(f"\n\nThe secret number is {number}. Remember it.\n\n")
        asked, answer = tokens("\n\nThe secret number is"), tokens(f" {number}")
        room = CONTEXT - 16 - len(told) - len(asked)
        at = int((needle + 0.5) / options.needles * room)
        prompt = torch.tensor([[*filler[:at], *told, *filler[at:room], *asked]])
        attention.chosen = None
        first = int(model(prompt, use_cache=False, logits_to_keep=1).logits.argmax())
        for budget in (CONTEXT // 2, CONTEXT // 4):
            for policy, width in (("h2o", 1), ("snapkv", 1), ("snapkv", 7), ("snapkv", 15)):
                attention.chosen = dict(attention.choose(policy, budget, width))
                positions = prompt.shape[1] + torch.arange(len(answer))[None]
                logits = model(torch.tensor([answer]), position_ids=positions, use_cache=False).logits
                right = [first, *logits[0, :-1].argmax(-1).tolist()] == answer
                found[policy, budget, width] = found.get((policy, budget, width), 0) + right
    for (policy, budget, width), count in found.items():
        print(f"{policy}, {budget} kept, pooled over {width}: {count} of {options.needles}")


if __name__ == "__main__":
    main()
