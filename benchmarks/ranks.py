"""Two ranks with a core each beside one process with two threads, interleaved; and the time of a sum over ranks.

    python benchmarks/ranks.py ONE.engine TWO.engine [--prompt 512] [--tokens 32] [--rounds 5]

ONE is compiled for one rank, TWO with --tensor-parallel 2 or --pipeline-parallel 2. Prints the median milliseconds of a
decode step and of a prompt, and the speed of two ranks relative to one process (above 1: ranks are faster). `--sums`
first times all-reduces of 8 KB and of 32 MB between two processes, with the copy bandwidth beside them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import icc
import numpy as np
from icc.runtime.llm import LLM


def decode_seconds(llm: LLM, tokens: int) -> float:
    """Seconds per token of a batch of one."""
    params = icc.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate([[1, 2, 3]], params)
    return (time.perf_counter() - begin) / tokens


def prompt_seconds(llm: LLM, prompt: int, seed: int) -> float:
    """Seconds of a random prompt of `prompt` tokens that no cache has."""
    ids = np.random.default_rng(seed).integers(3, llm.manifest.model.vocab_size, prompt).tolist()
    begin = time.perf_counter()
    llm.generate([ids], icc.SamplingParams(max_tokens=1, temperature=0.0))
    return time.perf_counter() - begin


def compare(one: str, two: str, prompt: int, tokens: int, rounds: int) -> None:
    """Measure both engines interleaved, so that both run under the same load, and print the table."""
    with icc.load(one, threads=2) as alone, icc.load(two, threads=2) as ranks:
        tasks: dict[str, Callable[[LLM, int], float]] = {
            "decode, batch 1": lambda llm, seed: decode_seconds(llm, tokens),
            f"prompt of {prompt}": lambda llm, seed: prompt_seconds(llm, prompt, seed),
        }
        for name, task in tasks.items():
            task(alone, 0), task(ranks, 0)
            pairs = [(task(alone, seed), task(ranks, seed)) for seed in range(1, rounds + 1)]
            first, second = (statistics.median(side) for side in zip(*pairs, strict=True))
            ratio = statistics.median(a / b for a, b in pairs)
            print(
                f"{name}: one process {first * 1e3:.2f} ms, two ranks {second * 1e3:.2f} ms, {ratio:.3f} of its speed"
            )


def time_sums(rounds: int) -> None:
    """Time all-reduces between two processes with one thread each, and print them."""
    from rank_sums import sum_seconds

    source = np.ones(32 << 20, np.uint8)
    target = np.empty_like(source)
    copies = []
    for _ in range(rounds):
        begin = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - begin)
    copied = 2 * source.nbytes / statistics.median(copies) / 1e9  # read and written
    for nbytes in (8 << 10, 32 << 20):
        seconds = sum_seconds(nbytes, rounds)
        speed = f"{nbytes / seconds / 1e9:.2f} GB/s (copies read and write {copied:.1f})"
        print(f"all_reduce of {nbytes >> 10} KB: {seconds * 1e6:.1f} us, {speed}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one")
    parser.add_argument("two")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sums", action="store_true")
    asked = parser.parse_args()
    if asked.sums:
        time_sums(asked.rounds)
    compare(asked.one, asked.two, asked.prompt, asked.tokens, asked.rounds)


if __name__ == "__main__":
    main()
