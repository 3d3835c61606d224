"""Programmatic dependent launch on this machine's GPU: tokens, and the step time of one sequence, with and without it.

    python benchmarks/gpu_launch.py --target h100 [--layers 4] [--quant rtn4] [--work build/gpu-launch]

The checkpoint has a few layers of Llama 8B with random weights, so that the script takes a minute. Kernels that begin
early are right only if each waits for the one before it: greedy tokens of several prompts, alone and in a batch, and
logits must have the same bits either way. The status is 0 if they have.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import icc
import make_model
import numpy as np
import torch
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.measure.gpu_tune import full_batch
from icc.runtime.executor.device import DeviceWork

LIMITS = {"max_seq_len": 2048, "max_batch_size": 4, "max_step_tokens": 64}
GREEDY = icc.SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
ROUNDS = 200


def main() -> int:
    """Compare both ways and print the results; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100")
    parser.add_argument("--shape", default="llama-8b", choices=sorted(make_model.SHAPES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--quant", default="rtn4")
    parser.add_argument("--work", type=Path, default=Path("build/gpu-launch"))
    a = parser.parse_args()
    hidden, _, heads, kv_heads, ffn, _, _ = make_model.SHAPES[a.shape]
    make_model.SHAPES["few"] = hidden, a.layers, heads, kv_heads, ffn, 32000, True
    model, engine = a.work / f"{a.shape}-{a.layers}", a.work / f"{a.shape}-{a.layers}-{a.quant}.engine"
    begin = time.monotonic()
    if not (model / "model.safetensors").is_file():
        make_model.write("few", model, device="cuda" if torch.cuda.is_available() else "cpu")
    icc.compile(model, engine, target=a.target, quant=a.quant, force=True, **LIMITS)
    print(f"checkpoint and engine: {time.monotonic() - begin:.0f} s", flush=True)
    loaded = {}
    for early in (True, False):
        os.environ["ICC_DEPENDENT_LAUNCH"] = str(int(early))
        loaded[early] = icc.load(engine, kv_bytes=256 << 20)
        assert device_of(loaded[early]).cuda.overlaps == early
    answers = {early: answer(llm) for early, llm in loaded.items()}
    same = all(np.array_equal(x, y) for x, y in zip(answers[True], answers[False], strict=True))
    steps = {early: Step(llm) for early, llm in loaded.items()}
    times: dict[bool, list[float]] = {True: [], False: []}
    for early in (True, False) * 5:
        times[early].append(steps[early].microseconds())
    launches = steps[True].launches
    print(f"{launches} launches per step, {launches / a.layers:.1f} per layer, with those outside layers")
    for early, found in times.items():
        shown = f"step of one sequence {statistics.median(found):.1f} us (least {min(found):.1f})"
        print(f"dependent launch {'on' if early else 'off'}: {shown}")
    print("equal tokens and logits" if same else "DIFFERENT tokens or logits")
    return int(not same)


def answer(llm: icc.LLM) -> list[Any]:
    """Greedy tokens of prompts of several lengths, alone and twice in a batch, and the logits of one."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 32000, n).tolist() for n in (5, 70, 200, 700)]
    alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    both = [one.token_ids for _ in range(2) for one in llm.generate(prompts, GREEDY)]
    return [*alone, *both, llm.logits(prompts[2])]


def device_of(llm: icc.LLM) -> Any:
    """The CudaDevice under an LLM."""
    return llm.executor.device  # type: ignore[attr-defined]


class Step:
    """The decode step of one sequence in the middle of its context, prepared to run repeatedly."""

    def __init__(self, llm: icc.LLM) -> None:
        player: Any = llm.executor
        self._device = player.device
        phase = self._device.plan.phase(1, 1)
        sizes = player.prepare(full_batch(Shape(1, True), llm.manifest.limits, player.groups))
        self._work = DeviceWork(sizes, phase)
        grids = (launch.grid for launch, _ in self._device.walker.launches(phase))
        self.launches = sum(all(dim.value(sizes) for dim in grid) for grid in grids)

    def microseconds(self) -> float:
        """Microseconds of one step, the mean of many."""
        cuda = self._device.cuda

        def many() -> None:
            for _ in range(ROUNDS):
                self._device.run(self._work)

        many()
        return cuda.seconds(many) / ROUNDS * 1e6


if __name__ == "__main__":
    sys.exit(main())
