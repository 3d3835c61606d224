"""Many adapters on disk, few slots, and requests that name adapters by Zipf's law: tokens per second, and the ratio to
requests that all name the same adapter.

    icc compile build/llama-1b -o build/slots.engine --target native --quant rtn4 --adapters 32x16:self_attn.*
    python benchmarks/adapter_traffic.py build/slots.engine --adapters 1000 --requests 200 --threads 2

Adapters are random and cover every layer that the engine has adapter slots for. Their configurations differ, so that
the engine treats each as a separate adapter, but all share a few files of weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import icc
import numpy as np
from adapter_cost import write_adapter
from icc.runtime.llm import LLM

FILES = 8  # of weights, which the adapters' directories hard-link


def write_adapters(llm: LLM, folder: Path, count: int, rank: int) -> list[str]:
    """Write and load `count` adapters; their names."""
    for number in range(min(FILES, count)):
        write_adapter(llm, folder / f"weights{number}", rank, number)
    names = [f"a{number}" for number in range(count)]
    for number, name in enumerate(names):
        source = folder / f"weights{number % FILES}"
        (folder / name).mkdir()
        os.link(source / "adapter_model.safetensors", folder / name / "adapter_model.safetensors")
        config = json.loads((source / "adapter_config.json").read_text())
        (folder / name / "adapter_config.json").write_text(json.dumps({**config, "revision": name}))
        llm.load_adapter(name, folder / name)
    return names


def tokens_per_s(llm: LLM, adapters: list[str], tokens: int, seed: int) -> float:
    """Generated tokens per second of one request for each of `adapters`, all submitted at once."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(3, 1000, 16).tolist() for _ in adapters]
    params = icc.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, adapter=adapters)
    return len(adapters) * tokens / (time.perf_counter() - start)


def main() -> None:
    """Print a line per round, and the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--exponent", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    given = parser.parse_args()
    found: dict[str, list[float]] = {"one": [], "zipf": []}
    with tempfile.TemporaryDirectory() as folder, icc.load(given.engine, threads=given.threads) as llm:
        names = write_adapters(llm, Path(folder), given.adapters, given.rank)
        weights = np.arange(1, given.adapters + 1) ** -given.exponent
        for turn in range(given.rounds):
            random = np.random.default_rng(turn)
            drawn = random.choice(given.adapters, given.requests, p=weights / weights.sum())
            for kind, chosen in (("one", [0] * given.requests), ("zipf", drawn)):
                rate = tokens_per_s(llm, [names[number] for number in chosen], given.tokens, turn)
                found[kind].append(rate)
                print(f"{kind:5} {rate:8.1f} tokens/s, {len(set(chosen))} adapters", flush=True)
    one, zipf = (statistics.median(found[kind]) for kind in ("one", "zipf"))
    print(f"zipf over one: {zipf / one:.3f}")


if __name__ == "__main__":
    main()
