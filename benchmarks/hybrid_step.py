"""A decode step of layers with a recurrent state or with experts, beside what memory gives in the same seconds.

`python benchmarks/hybrid_step.py FOLDER [SHAPE ..]`: engines as hybrid.py made them. One thread, CPU seconds: bytes of
the weights that a token reads (of experts those that it takes, of a screened head half) and of its states, per second,
over those of a plain read of 96 MiB before and after. A state's rows of an unfinished chunk count as if all were read.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import icc
import numpy as np
from hybrid_shapes import SHAPES, Shape

STEPS, ROUNDS = 8, 9


def read_rate(memory: np.ndarray) -> float:
    """Bytes per second of this thread."""
    found = []
    for _ in range(2):
        start = time.process_time()
        memory.max()
        found.append(memory.nbytes / (time.process_time() - start))
    return max(found)


def step_bytes(llm: icc.LLM, shape: Shape) -> float:
    """What one token reads: the largest weight but experts' is the head, those of three dimensions are experts'."""
    program = llm.engine.program  # type: ignore[union-attr]
    weights = program.weights.values()
    sizes = [weight.nbytes for weight in weights if len(weight.shape) != 3]
    experts = sum(weight.nbytes for weight in weights if len(weight.shape) == 3)
    taken = shape.config.get("num_experts_per_tok", 0) / shape.keys.get("expert_count", 1)
    states = sum(group.block_bytes() for group in program.kv.groups if group.holds_states)
    return sum(sizes) - max(sizes) / 2 + experts * taken + states


def main() -> None:
    """Print one row per shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES))
    options, memory = parser.parse_args(), np.ones(24 << 20, np.float32)
    params = icc.SamplingParams(max_tokens=STEPS * ROUNDS + 9, temperature=0.0, ignore_eos=True)
    for shape in options.shapes:
        with icc.load(options.folder / f"{shape}.engine", threads=1, verify=False) as llm:
            nbytes = step_bytes(llm, SHAPES[shape])
            [generation] = llm.loop.add([5] * 16, params)
            while generation.first_token is None:
                llm.loop.step()
            rates, read = [], [read_rate(memory)]
            for _ in range(ROUNDS):
                start = time.process_time()
                for _ in range(STEPS):
                    llm.loop.step()
                rates.append(nbytes * STEPS / (time.process_time() - start))
                read.append(read_rate(memory))
        shares = [rate / max(read[i : i + 2]) for i, rate in enumerate(rates)][1:]
        beside = f"{np.median(rates) / 1e9:.1f} GB/s, of {np.median(read) / 1e9:.1f}"
        print(f"{shape}: {nbytes / 1e6:.0f} MB a step, {beside}: {np.median(shares):.2f}", end=" ")
        print(f"({min(shares):.2f}-{max(shares):.2f})")


if __name__ == "__main__":
    main()
