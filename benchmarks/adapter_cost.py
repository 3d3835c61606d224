"""What adapters cost: decode steps without one, with one for all sequences, and with one each, interleaved.

    icc compile build/llama-1b -o build/adapters.engine --target native --quant rtn4 --adapters 64x16
    python benchmarks/adapter_cost.py build/adapters.engine --batch 1,16 --adapters 64 --rank 16 --threads 2

Adapters are random, cover every layer that the engine has adapter slots for, and are written as peft writes them.
Times are medians over the steps of a run, then over the rounds; a ratio is over the median without adapters.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import icc
import numpy as np
from icc.runtime.llm import LLM
from icc.runtime.query import adapted
from safetensors.numpy import save_file

SETTLING = 4  # leading steps of a run with all sequences that are left out of the median


def write_adapter(llm: LLM, folder: Path, rank: int, seed: int) -> None:
    """Write a random adapter for every site that the engine has slots for, except experts."""
    plan, random = llm.executor.adapters, np.random.default_rng(seed)  # type: ignore[attr-defined]
    tensors: dict[str, np.ndarray] = {}
    for site in plan.sites:
        if not site.experts:
            module = "base_model.model." + site.parameter.removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = random.normal(0, 0.01, (rank, site.k)).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = random.normal(0, 0.01, (site.n, rank)).astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


# wall time, or CPU time if BENCH_CLOCK=cpu is set: on a shared machine that is meaningful with one thread
clock = time.process_time if os.environ.get("BENCH_CLOCK") == "cpu" else time.perf_counter


def step_ms(llm: LLM, names: Sequence[str | None], tokens: int) -> float:
    """Median milliseconds of the steps in which all sequences decode together (at first some wait for adapters)."""
    params = icc.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    prompts = [[5 + number, 7, 9, 11] for number in range(len(names))]
    tasks = [llm.submit(query) for query in adapted(llm.prompting.queries(prompts, params), names)]
    times: list[float] = []
    while not all(task.done for task in tasks):
        start = clock()
        llm.driver.step()
        if llm.loop.scheduler.num_running == len(names):
            times.append(clock() - start)
    return statistics.median(times[SETTLING:]) * 1e3


def main() -> None:
    """Print a line per batch size and kind, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, icc.load(given.engine, threads=given.threads) as llm:
        names = [f"a{number}" for number in range(given.adapters)]
        loads: list[float] = []
        for number, name in enumerate(names):
            write_adapter(llm, Path(folder) / name, given.rank, number)
            start = time.perf_counter()
            llm.load_adapter(name, Path(folder) / name)
            loads.append(time.perf_counter() - start)
        found: dict[str, list[float]] = {}
        for turn in range(given.rounds):
            for batch in map(int, given.batch.split(",")):
                kinds: dict[str, list[str | None]] = {
                    "none": [None] * batch,
                    "one": [names[0]] * batch,
                    "distinct": [names[(turn * batch + number) % len(names)] for number in range(batch)],
                }
                for kind, chosen in kinds.items():
                    found.setdefault(f"batch {batch}, {kind}", []).append(step_ms(llm, chosen, given.tokens))
    print(f"load {statistics.median(loads):.3f} s, {given.adapters} adapters of rank {given.rank}")
    medians = {case: statistics.median(values) for case, values in found.items()}
    for case, value in medians.items():
        ratio = value / medians[f"{case.split(',')[0]}, none"]
        print(f"{case:22} {value:8.2f} ms  {ratio:.3f}  [{min(found[case]):.2f}, {max(found[case]):.2f}]")


if __name__ == "__main__":
    main()
