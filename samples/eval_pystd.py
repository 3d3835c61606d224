"""Evaluate a checkpoint: bits per byte on the held-out text, against `xz -9e`, and a few completions.

Run it as `python samples/eval_pystd.py`, or with `--model` and `--text` for another checkpoint or other documents.
"""

from __future__ import annotations

import argparse
import lzma
import math
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

SAMPLE = Path(__file__).parent / "pystd"
PROMPTS = ("def fib(n):", "class Stack:\n", "import os\n")


@torch.inference_mode()
def negative_log2(model: PreTrainedModel, ids: list[int], context: int) -> float:
    """Bits to code `ids[1:]` after `ids[0]`: windows of `context` tokens that advance by half their length."""
    bits, scored = 0.0, 1
    while scored < len(ids):
        end = min(len(ids), max(scored + context // 2, context + 1))
        window = torch.tensor([ids[max(0, end - context - 1) : end]])
        logits = model(input_ids=window[:, :-1], use_cache=False).logits[0]
        nll = cross_entropy(logits[-(end - scored) :].float(), window[0, -(end - scored) :], reduction="sum")
        bits, scored = bits + nll.item() / math.log(2), end
    return bits


def bits_per_byte(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> tuple[float, float]:
    """(bits per byte, perplexity per token) over documents that each start with the beginning-of-text token."""
    bits, count = 0.0, 0
    for text in texts:
        ids = [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]
        bits += negative_log2(model, ids, model.config.max_position_embeddings)
        count += len(ids) - 1
    return bits / sum(len(text.encode()) for text in texts), 2 ** (bits / count)


def xz_bits_per_byte(texts: list[str]) -> float:
    """What `xz -9e` makes of the same texts in one file."""
    data = "".join(texts).encode()
    return 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)


def complete(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, *, sample: bool, tokens: int
) -> str:
    """The prompt and up to `tokens` more tokens, greedy or sampled with the checkpoint's own defaults."""
    torch.manual_seed(0)
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(prompt, add_special_tokens=False)]])
    generate = cast("Callable[..., torch.Tensor]", model.generate)
    output = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=sample)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def main() -> None:
    """Parse the command line and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SAMPLE)
    parser.add_argument("--text", type=Path, default=SAMPLE / "heldout", help="a file, or a directory of *.txt files")
    parser.add_argument("--tokens", type=int, default=80, help="length of the completions; 0 prints none")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    files = sorted(options.text.glob("*.txt")) if options.text.is_dir() else [options.text]
    texts = [file.read_text(encoding="utf-8") for file in files]

    bpb, perplexity = bits_per_byte(model, tokenizer, texts)
    xz = xz_bits_per_byte(texts)
    print(f"text    {sum(len(text.encode()) for text in texts)} bytes in {len(texts)} documents")
    print(f"model   {bpb:.4f} bits per byte (perplexity {perplexity:.3f} per token)")
    print(f"xz -9e  {xz:.4f} bits per byte")
    for prompt in PROMPTS if options.tokens else ():
        for sample in (False, True):
            print(f"\n--- {prompt!r}, {'sampled' if sample else 'greedy'}")
            print(complete(model, tokenizer, prompt, sample=sample, tokens=options.tokens))


if __name__ == "__main__":
    main()
