"""The gain of overlapping launches: the step time of few sequences with and without them, on this GPU.

    python benchmarks/gpu_step.py [--shape llama-1b] [--quant rtn4] [--layers 0] [--batches 1] [--work build/gpu-step]

The engine's decode steps are compiled in each variant and interleaved over the same weights. wait: every kernel waits
for the one before it; next: attention lets the next kernel begin after its last loop; first: all kernels let the next
begin at once; off: launches do not overlap. For one sequence a layer can also be one kernel (--step-kernel): step: as
icc builds it; unasked: no stage prefetches weights before it waits; uncut: as unasked, and stages have the tilings of
separate launches. Logits must have the same bits in all variants.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import icc
import make_model
import numpy as np
from icc.compiler.backends.triton import dependent
from icc.compiler.backends.triton.kernels.linear import LinearKernel
from icc.compiler.backends.triton.objects.compile import compile_specs
from icc.compiler.backends.triton.plan import make_plan, plan_program
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling import whole
from icc.compiler.backends.triton.tiling.choice import Config, Tuner
from icc.compiler.backends.triton.tiling.tuned import load_tuned
from icc.compiler.backends.triton.tiling.whole import WholeTilings
from icc.compiler.measure.gpu_tune import full_batch
from icc.compiler.program.program import Program, program_of
from icc.compiler.targets import TARGETS
from icc.runtime.executor.cuda.launches import ReadyLaunch
from icc.runtime.executor.walk import Walker
from icc.runtime.format.load import open_engine
from icc.runtime.format.manifest import Limits

LIMITS: dict[str, Any] = {"max_seq_len": 2048, "max_step_tokens": 16}
ROUNDS, STEPS = 9, 20
STEPS_AS_ONE = ("step", "unasked", "uncut")
VARIANTS = ("off", "wait", "next", "first", *STEPS_AS_ONE)


@contextmanager
def variant(name: str) -> Iterator[None]:
    """Render kernel sources as the variant `name` inside this block."""
    waiting = dependent._waiting

    def plain(line: str) -> str:
        return "" if line.strip() == dependent._NEXT else line

    def early(source: str, entry: str) -> str:
        text, call = waiting(source.replace(f"    {dependent._NEXT}\n", ""), entry), dependent._call("    ", "wait")
        return text.replace(call, f"{call}{dependent._call('    ', 'next')}")

    waiting.cache_clear()
    with ExitStack() as stack:
        if name in ("off", "wait"):
            stack.enter_context(patch.object(dependent, "_done", plain))
        if name == "first":
            stack.enter_context(patch.object(dependent, "_waiting", early))
        if name in ("unasked", "uncut"):
            stack.enter_context(patch.object(LinearKernel, "staged", lambda kernel: kernel))
        if name == "uncut":
            stack.enter_context(patch.object(WholeTilings, "tilings", lambda whole, held: _launched(whole)))
            stack.enter_context(patch.object(WholeTilings, "registers", lambda *_: 0))
        if name in STEPS_AS_ONE:  # take the step kernel even if the model expects it to be slower
            stack.enter_context(patch.object(whole, "BETWEEN", 1e-3))
        yield
    waiting.cache_clear()


def _launched(found: WholeTilings) -> dict[str, Config]:
    return {product.key: product.launched for product in found.products}


class Steps:
    """The decode step of `batch` sequences in one variant, prepared to run repeatedly."""

    def __init__(self, llm: Any, program: Program, target: str, batch: int, name: str) -> None:
        player, limits = llm.executor, llm.manifest.limits
        self.device, shape = player.device, Shape(batch, True)
        tuner = Tuner(TARGETS[target], load_tuned(TARGETS[target]))
        with variant(name):
            planned = plan_program(program, limits, tuner, [shape], step_kernel=name in STEPS_AS_ONE)
        compiled = compile_specs(planned.specs().values(), TARGETS[target])
        plan = make_plan(planned, TARGETS[target], compiled)
        device = self.device
        device.take_scratch(plan.scratch_bytes)
        functions = {
            key: device.cuda.function(compiled[key].binary, found.entry, found.shared_bytes)
            for key, found in plan.objects.items()
        }
        walker = Walker(device.program, plan, device.cache, device.limits, device.cuda.multiprocessors())
        self._ready = [
            ReadyLaunch(functions[launch.object], plan.objects[launch.object], launch, arguments, device._address)
            for launch, arguments in walker.launches(plan.phases[0])
        ]
        if name == "off":
            for launch in self._ready:
                launch._dependent = False
        self._sizes = player.prepare(full_batch(shape, limits, player.groups))
        self.graph = device.cuda.capture(self._once)
        self._rows = batch

    def _once(self) -> None:
        for launch in self._ready:
            launch.put(self.device.cuda, self._sizes)

    def logits(self) -> np.ndarray:
        """The logits of one step [batch, vocab]."""
        device = self.device
        device.cuda.launch_graph(self.graph)
        device.cuda.to_host(device.logits[: self._rows], device._addresses["logits"])
        device.cuda.wait()
        return device.logits[: self._rows].copy()

    def microseconds(self) -> float:
        """Microseconds of one step, the mean of many."""
        cuda = self.device.cuda

        def many() -> None:
            for _ in range(STEPS):
                cuda.launch_graph(self.graph)

        return cuda.seconds(many) / STEPS * 1e6


def main() -> int:
    """Compile missing files, compare logits, measure; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100")
    parser.add_argument("--shape", default="llama-1b", choices=sorted(make_model.SHAPES))
    parser.add_argument("--layers", type=int, default=0, help="number of layers, with 32,000 tied tokens; 0: all")
    parser.add_argument("--quant", default="rtn4")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--work", type=Path, default=Path("build/gpu-step"))
    parser.add_argument("--compile-only", action="store_true")
    a = parser.parse_args()
    batches = list(map(int, a.batches.split(",")))
    begun = time.monotonic()
    few(a.shape, a.layers)
    engine = _engine(a, batches)
    print(f"engine after {time.monotonic() - begun:.0f} s", flush=True)
    opened = open_engine(engine, verify=False)
    same, program = True, program_of(opened)
    compile_all(program, opened.manifest.limits, a.target, batches)
    if a.compile_only:
        return 0
    print(f"variants after {time.monotonic() - begun:.0f} s", flush=True)
    with icc.load(engine, kv_bytes=256 << 20) as llm:
        for batch in batches:
            steps = {name: Steps(llm, program, a.target, batch, name) for name in VARIANTS}
            found = {name: one.logits() for name, one in steps.items()}
            same &= all(np.array_equal(one, found["off"]) for one in found.values())
            times: dict[str, list[float]] = {name: [] for name in VARIANTS}
            for _ in range(ROUNDS):
                for name, one in steps.items():
                    times[name].append(one.microseconds())
            shown = ", ".join(f"{n} {statistics.median(t):.1f} ({min(t):.1f})" for n, t in times.items())
            print(f"{a.shape} {a.quant}, {batch} sequences, us per step (least): {shown}", flush=True)
            facts = {"shape": a.shape, "quant": a.quant, "batch": batch}
            for name, found in times.items():
                print(json.dumps({**facts, "variant": name, "us": round(statistics.median(found), 2)}), flush=True)
    print("equal logits" if same else "DIFFERENT logits")
    return int(not same)


def few(shape: str, layers: int) -> None:
    """Define the shape "few": `layers` layers of another shape and 32,000 tied tokens; 0: that shape unchanged."""
    hidden, all_layers, heads, kv_heads, ffn, vocab, tied = make_model.SHAPES[shape]
    vocab, tied = (32000, True) if layers else (vocab, tied)
    make_model.SHAPES["few"] = hidden, layers or all_layers, heads, kv_heads, ffn, vocab, tied


def _engine(a: Any, batches: list[int]) -> Path:
    """The path of an engine with random weights, compiled unless it exists."""
    name = f"{a.shape}-{a.layers or make_model.SHAPES[a.shape][1]}"
    model, engine = a.work / name, a.work / f"{name}-{a.quant}.engine"
    if not (model / "model.safetensors").is_file():
        make_model.write("few", model, device="cuda")
    if not (engine / "engine.json").is_file():
        icc.compile(
            model,
            engine,
            target=a.target,
            quant=a.quant,
            force=True,
            step_kernel=True,
            max_batch_size=max(batches),
            **LIMITS,
        )
    return engine


def compile_all(program: Program, limits: Limits, target: str, batches: list[int]) -> None:
    """Compile the objects of all variants into the cache."""
    tuner, specs = Tuner(TARGETS[target], load_tuned(TARGETS[target])), {}
    for name in VARIANTS:
        with variant(name):
            shapes = [Shape(b, True) for b in batches]
            planned = plan_program(program, limits, tuner, shapes, step_kernel=name in STEPS_AS_ONE)
        specs |= planned.specs()
    compile_specs(specs.values(), TARGETS[target])


if __name__ == "__main__":
    sys.exit(main())
