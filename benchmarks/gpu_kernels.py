"""The time of every kernel of an engine on this machine's GPU, beside the prediction of the cost model.

    python benchmarks/gpu_kernels.py ENGINE --out results/gpu-kernels-1b

For each phase (decodes of 1, 2, 4 … sequences in the middle of their context, prompts of several sizes) and each
kernel: the median time of its launches over all layers, repeated in a CUDA graph; bytes of weights read over that time;
and the modelled time of the engine's tiling. Whole steps are measured, too. Writes OUT.json; prints a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from icc.compiler.backends.triton.plan import plan_program
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Config, Tuner
from icc.compiler.backends.triton.tiling.tuned import load_tuned
from icc.compiler.measure.gpu_tune import alone, full_batch
from icc.compiler.program.program import Program, program_of
from icc.compiler.targets import find_target
from icc.runtime.executor.cuda.device import CudaDevice
from icc.runtime.executor.device import DeviceWork
from icc.runtime.executor.player import Player
from icc.runtime.format.load import Engine, open_engine
from icc.runtime.format.operands import WeightOperand

_REPEATS, _ROUNDS = 4, 7


@dataclass(frozen=True)
class Modelled(Tuner):
    """A tuner that records the tilings that it picks and their modelled seconds."""

    costs: list[float] = field(default_factory=list)
    configs: list[Config] = field(default_factory=list)

    def pick(self, key: str, candidates: Sequence[Config], cost: Callable[[Config], float]) -> Config:
        best = super().pick(key, candidates, cost)
        self.costs.append(cost(best))
        self.configs.append(best)
        return best


def main() -> None:
    """Measure all kernels of the chosen phases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--phases", default="", help="such as d1,d64,m512; default: all")
    a = parser.parse_args()
    engine = open_engine(a.engine, verify=False)
    executor = Player(CudaDevice(engine))
    rows: list[dict[str, Any]] = []
    try:
        for phase in executor.device.plan.phases:
            name = f"{'d' if phase.decode else 'm'}{phase.max_tokens}"
            if not a.phases or name in a.phases.split(","):
                rows += measure(engine, executor, name, phase)
    finally:
        executor.close()
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    print(as_table(rows))


def measure(engine: Engine, executor: Player[CudaDevice], name: str, phase: Any) -> list[dict[str, Any]]:
    """One row per kernel of a phase, and one of the whole step."""
    device, program = executor.device, program_of(engine)
    shape = Shape(phase.max_tokens, phase.decode)
    sizes = executor.prepare(full_batch(shape, engine.manifest.limits, executor.groups))
    rows = []
    for kernel, objects in [*phase.launches.items(), ("before", phase.before), ("sampling", phase.after)]:
        calls = [call for call in device.plan.calls if call.kernel == kernel] or [None]
        ready = [
            device.ready(device._functions[launch.object], device.plan.objects[launch.object], launch, call)
            for call in calls
            for launch in objects
        ]

        def once(ready: Sequence[Any] = ready) -> None:
            for launch in ready * _REPEATS:
                launch.put(device.cuda, sizes)

        seconds = timed(device, once) / _REPEATS / len(calls) if ready else 0.0
        facts = modelled(program, engine, kernel, shape) if calls[0] else {}
        nbytes = weight_bytes(program, kernel) / len(calls)
        rows.append({
            "phase": name, "kernel": kernel, "calls": len(calls), "launches": len(objects), "us": 1e6 * seconds,
            "gb_s": nbytes / seconds / 1e9 if seconds else 0.0, **facts,
        })  # fmt: skip
    whole = timed(device, lambda: device._walk(DeviceWork(sizes, phase)))
    rows.append({"phase": name, "kernel": "whole step", "calls": 1, "us": 1e6 * whole, "launches": 0, "gb_s": 0.0})
    return rows


def timed(device: CudaDevice, work: Callable[[], None]) -> float:
    """Median seconds of `work`, captured in a CUDA graph."""
    graph = device.cuda.capture(work)
    device.cuda.launch_graph(graph)
    found = statistics.median(device.cuda.seconds(lambda: device.cuda.launch_graph(graph)) for _ in range(_ROUNDS))
    device.cuda.forget_graph(graph)
    return found


def modelled(program: Program, engine: Engine, kernel: str, shape: Shape) -> dict[str, Any]:
    """The cost model's choice for a kernel: its modelled microseconds and its tiling."""
    target = find_target(engine.manifest.target)
    tuner = Modelled(target, load_tuned(target))
    plan_program(alone(program, kernel), engine.manifest.limits, tuner, [shape])
    return {"modelled_us": 1e6 * max(tuner.costs, default=0.0), "tilings": tuner.configs[:1]}


def weight_bytes(program: Program, kernel: str) -> int:
    """Bytes of all weights that the steps of a kernel read."""
    operands = [o for step in program.steps if step.kernel == kernel for o in step.operands.values()]
    return sum(program.weights[o.name].nbytes for o in operands if isinstance(o, WeightOperand))


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a text table."""
    lines = [f"{'phase':6} {'kernel':34} {'calls':>5} {'n':>2} {'us':>8} {'model':>8} {'GB/s':>6}  tiling"]
    for row in rows:
        tiling = " ".join(f"{k[0]}{v}" for k, v in (row.get("tilings") or [{}])[0].items())
        lines.append(
            f"{row['phase']:6} {row['kernel'][:34]:34} {row['calls']:5} {row['launches']:2} {row['us']:8.1f} "
            f"{row.get('modelled_us', 0.0):8.1f} {row['gb_s']:6.0f}  {tiling}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
