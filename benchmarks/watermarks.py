"""The cost of watermarks and how well they are detected: perplexities of marked texts by their own model, and z-scores.

    python benchmarks/watermarks.py ENGINE [--texts 24] [--tokens 200]

All texts answer one prompt at temperature 1, each with its own seed and its own key, because some methods give equal
answers to equal prompts. The table goes to standard output; benchmarks/results/watermarks.md has a copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import icc
import numpy as np
from icc.runtime.llm import LLM
from icc.runtime.requests.params import SamplingParams
from icc.runtime.watermark.detect import THRESHOLD, detect
from icc.runtime.watermark.settings import Watermark

KEY = 15485863
SYNTHID = tuple(range(101, 131))  # as many keys as the paper takes
MARKS = {
    "no mark": None,
    "`kgw`, bias 1": Watermark(KEY, bias=1.0),
    "`kgw`, bias 2": Watermark(KEY),
    "`kgw`, bias 4": Watermark(KEY, bias=4.0),
    "`gumbel`": Watermark(KEY, "gumbel"),
    "`dual_key_gumbel`, alpha 0.1": Watermark(KEY, "dual_key_gumbel"),
    "`synthid`, 30 keys": Watermark(SYNTHID, "synthid"),
}


def other(mark: Watermark, number: int) -> Watermark:
    """The watermark with keys shifted by `number`."""
    return replace(mark, key=tuple(key + number for key in mark.keys) if mark.method == "synthid" else KEY + number)


def nll(llm: LLM, prompt: Sequence[int], text: Sequence[int]) -> np.ndarray:
    """The negative log-likelihood of each token of a text, in nats, float64 `[tokens]`."""
    logits = llm.logits([*prompt, *text])[len(prompt) - 1 : -1].astype(np.float64)
    largest = logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits - largest).sum(axis=1)) + largest[:, 0]
    return total - logits[np.arange(len(text)), list(text)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompt", default="The")
    given = parser.parse_args()
    columns = f"{given.texts} texts of {given.tokens} tokens", "perplexity (standard error)", "median z-score"
    print(f"| {' | '.join(columns)} | told at {THRESHOLD:g} |")
    print("|---|---|---|---|")
    with icc.load(given.engine) as llm:
        prompt, vocab_size = llm.encode(given.prompt), llm.manifest.model.vocab_size
        for name, mark in MARKS.items():
            marks = [None if mark is None else other(mark, number) for number in range(given.texts)]
            params = [
                SamplingParams(max_tokens=given.tokens, temperature=1.0, seed=seed, ignore_eos=True, watermark=one)
                for seed, one in enumerate(marks)
            ]
            texts = [one.token_ids for one in llm.generate([prompt] * given.texts, params)]
            costs = np.array([nll(llm, prompt, text).mean() for text in texts])
            z_scores = [
                detect(text, one or Watermark(KEY), vocab_size).z_score for text, one in zip(texts, marks, strict=True)
            ]
            error = costs.std() / len(costs) ** 0.5
            told = sum(z_score >= THRESHOLD for z_score in z_scores)
            shown = f"{np.exp(costs.mean()):.1f} ({np.exp(costs.mean()) * error:.1f})"
            print(f"| {name} | {shown} | {median(z_scores):.1f} | {told} of {given.texts} |", flush=True)


if __name__ == "__main__":
    main()
