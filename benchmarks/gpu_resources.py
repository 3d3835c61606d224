"""Compiles a checkpoint for every GPU target and tabulates time, objects, registers, spills and occupancy.

    python benchmarks/make_model.py llama-1b build/llama-1b
    python benchmarks/gpu_resources.py build/llama-1b [--quant rtn4] [--out benchmarks/results/gpu_resources.md]

The cache of objects is left out, so the times are those of a first compile. Weights are not packed: only the kernels.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from datetime import date
from pathlib import Path

from icc.compiler.backends.base import Built
from icc.compiler.backends.triton.backend import TritonBackend
from icc.compiler.frontend.load import load_graph
from icc.compiler.program.lower import LowerOptions, lower
from icc.compiler.targets import TARGETS
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.runtime.format.manifest import Limits

LIMITS = Limits(max_seq_len=4096, max_batch_size=128, max_step_tokens=2048)


def build(model: Path, target: str, quant: str, folder: Path) -> Built:
    """All kernels of a model for one target."""
    graph = load_graph(model, LIMITS.max_seq_len)
    phases = [pipelines.canonicalize(), *([pipelines.quantize(quant, "int8", (), ())] if quant != "none" else [])]
    for phase in (*phases, pipelines.attention(), pipelines.fuse()):
        run_passes(graph, phase, PassContext())
    backend = TritonBackend(TARGETS[target], graph.info.weight_dtype)
    lowered = lower(graph, LowerOptions(backend.kv_dtype, backend.profile))
    return backend.build(lowered.program, LIMITS, folder / "kernels", lambda *_: None)


def main() -> None:
    """Compile for all targets and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quant", default="rtn4", choices=("none", "rtn4"))
    parser.add_argument("--targets", default=",".join(n for n, t in TARGETS.items() if t.backend != "cpu"))
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    text = [
        f"{a.model.name}, {a.quant}, {LIMITS}, {os.cpu_count()} cores, {date.today().isoformat()}\n",
        "| target | arch | trace to objects, s | objects | most registers | spilling | least occupancy |",
        "|---|---|---|---|---|---|---|",
    ]
    details: list[str] = []
    for name in a.targets.split(","):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["ICC_CACHE_DIR"] = folder
            start = time.perf_counter()
            plan = build(a.model, name, a.quant, Path(folder)).program.plan
            seconds = time.perf_counter() - start
        assert plan is not None
        found = plan.objects.values()
        spilling = sum(o.spill_bytes > 0 for o in found)
        text.append(
            f"| {name} | {TARGETS[name].arch} | {seconds:.0f} | {len(found)} | {max(o.registers for o in found)} | "
            f"{spilling} | {min(o.occupancy for o in found):.3f} |"
        )
        print(text[-1], flush=True)
        details += [f"\n## {name}\n", "| object | kernels | warps | registers | spill | shared | occupancy | faults |"]
        details.append("|---|---|---|---|---|---|---|---|")
        for row in plan.resources():
            kernels = ", ".join(row["kernels"])  # type: ignore[arg-type]
            values = [row[key] for key in ("warps", "registers", "spill_bytes", "shared_bytes", "occupancy", "faults")]
            details.append(f"| {row['object']} | {kernels} | {' | '.join(map(str, values))} |")
    if a.out:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text("\n".join(text + details) + "\n")


if __name__ == "__main__":
    main()
