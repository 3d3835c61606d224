"""The bandwidth of a decode step of layers with a recurrent state or with experts, beside a plain read of memory.

`python benchmarks/hybrid_step.py FOLDER [SHAPE ..]`: FOLDER has hybrid.py's engines. One thread, CPU seconds: bytes per
second of the weights that a token reads (the experts that it uses, half of a screened head) and of its states, over
those of a plain read of 96 MiB before and after. All of a state's rows for an unfinished chunk count as read.
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
    """Bytes per second that this thread reads, the best of two."""
    found = []
    for _ in range(2):
        start = time.process_time()
        memory.max()
        found.append(memory.nbytes / (time.process_time() - start))
    return max(found)


def step_bytes(llm: icc.LLM, shape: Shape) -> float:
    """Bytes that one token reads; three-dimensional weights are experts, the largest of the others is the head."""
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
