"""icc against llama.cpp on this machine: prefill of 512 tokens and decode at batch 1, in interleaved rounds.

    python benchmarks/cpu_llama.py build/llama-1b.engine build/llama-1b.gguf --out benchmarks/results/cpu_llama.json

Needs llama-cpp-python (built natively from PyPI), numpy, tokenizers and msgspec. Both engines live in this process and
take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import icc
import llama_cpp
import numpy as np
from icc.runtime.bench import BenchOptions, run_bench


def llama_round(model: Any, prompt: list[int], output: int) -> tuple[float, float]:
    """(prefill tok/s, decode tok/s)."""
    model.reset()
    start = time.perf_counter()
    model.eval(prompt)
    middle = time.perf_counter()
    for token in prompt[:output]:
        model.eval([token])
    return len(prompt) / (middle - start), output / (time.perf_counter() - middle)


def icc_round(llm: icc.LLM, prompt: int, output: int, seed: int) -> tuple[float, float]:
    """(prefill tok/s, decode tok/s). A new seed gives new prompts, which the prefix cache does not know."""
    result = run_bench(llm, BenchOptions(prompt, output, [1], 1, seed))[0]
    return result.prefill_tokens_per_s, result.decode_tokens_per_s


def main() -> None:
    """Measure, print a table of medians and ratios, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    peer = llama_cpp.Llama(
        str(a.gguf), n_ctx=a.prompt_tokens + a.output_tokens + 8, n_threads=a.threads, n_threads_batch=a.threads,
        n_batch=512, n_ubatch=512, verbose=False, logits_all=False,
    )  # fmt: skip
    prompt = np.random.default_rng(0).integers(10, 1000, a.prompt_tokens).tolist()
    rounds: dict[str, list[tuple[float, float]]] = {"icc": [], "llama.cpp": []}
    with icc.load(a.engine, threads=a.threads) as llm:
        for number in range(a.rounds + 1):  # the first round warms up
            rounds["icc"].append(icc_round(llm, a.prompt_tokens, a.output_tokens, number))
            rounds["llama.cpp"].append(llama_round(peer, prompt, a.output_tokens))
    facts = {"date": date.today().isoformat(), "llama_cpp_python": llama_cpp.__version__, "threads": a.threads}
    table: dict[str, Any] = {}
    for column, name in enumerate((f"prefill {a.prompt_tokens}", "decode b1")):
        medians = {engine: statistics.median(r[column] for r in found[1:]) for engine, found in rounds.items()}
        ratios = [i[column] / p[column] for i, p in zip(rounds["icc"][1:], rounds["llama.cpp"][1:], strict=True)]
        table[name] = {
            **medians,
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
        print(f"{name:12} icc {medians['icc']:7.1f} tok/s   llama.cpp {medians['llama.cpp']:7.1f} tok/s   "
              f"ratio {table[name]['ratio']:.2f} ({min(ratios):.2f}-{max(ratios):.2f})")  # fmt: skip
    if a.out:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text(json.dumps({**facts, "table": table, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
