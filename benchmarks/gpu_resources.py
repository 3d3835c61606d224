"""The resources of Llama 8B's kernels on every GPU target, phase by phase, read from the objects without a GPU.

    python benchmarks/gpu_resources.py [--targets h100,b200] [--quants rtn4] [--out benchmarks/results/gpu_resources.md]

Two tables per target and quantization. Phases: launches of a layer, and the modelled time of its products beside the
times that the target's peak rates allow for their bytes and their FLOPs. Objects: the matrix instructions of their
loops, FLOPs over those that were asked for, barriers per step, registers, spills, and the faults of their loops.
Weights are not read: config.json is enough. A target's part is kept under build/gpu_resources, so that an interrupted
run continues where it stopped; OUT gets all parts that are kept, and its text above the line "Made by" stays.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from icc.compiler.backends.triton.fallback import Objects, TilingSearch
from icc.compiler.backends.triton.kernels.linear import LinearKernel
from icc.compiler.backends.triton.objects.compile import Compiled, compile_specs
from icc.compiler.backends.triton.plan import Planned, PlannedPhase, kernel_of, make_plan, plan_program
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.backends.triton.tiling.linear import LinearTilings, pick
from icc.compiler.backends.triton.tiling.tuned import load_tuned
from icc.compiler.options import CompileOptions
from icc.compiler.planning.plan import make_plan as plan_model
from icc.compiler.program.program import Program
from icc.compiler.program.steps.attention import Attention
from icc.compiler.targets import TARGETS, Target
from icc.runtime.format.manifest import Limits
from icc.runtime.format.plan import SIZES

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
KEPT = Path("build/gpu_resources")
MARK = "Made by `benchmarks/gpu_resources.py`"


def layer(program: Program) -> tuple[int, int]:
    """The steps of one layer as [begin, end): from after its attention to after the next layer's attention."""
    first, second, *_ = (at for at, step in enumerate(program.steps) if isinstance(step, Attention))
    return first + 1, second + 1


def phase_row(program: Program, limits: Limits, phase: PlannedPhase, target: Target) -> str:
    """One phase as a row of the table."""
    begin, end = layer(program)
    tokens = phase.shape.max_tokens
    steps, tuner = program.steps[begin:end], Tuner(target, load_tuned(target))
    sizes = dict.fromkeys(SIZES, tokens) | {"num_moves": 0}
    launches = sum(all(dim.value(sizes) for dim in spec.grid) for step in steps for spec in phase.specs[step.kernel])
    modelled = read = done = 0.0
    for step in steps:
        kernel = kernel_of(step)
        if isinstance(kernel, LinearKernel):
            facts = kernel.product(tokens, target.level)
            modelled += LinearTilings(target).seconds(facts, pick(facts, tuner))
            read += (facts.matrix_bytes + 2 * facts.k * tokens) / (target.bandwidth * 1e9)
            peak = target.peak_i8 if facts.mode.eight else target.peak_f16
            done += 2.0 * facts.columns * facts.parts * facts.k * tokens / (peak * 1e12)
    kind = "decode" if phase.shape.decode else "mixed"
    times = " | ".join(f"{1e6 * seconds:.1f}" for seconds in (modelled, read, done))
    return f"| {kind} {tokens} | {launches} | {times} | {100 * max(read, done) / modelled:.0f} % |"


def object_rows(planned: Planned, compiled: Mapping[str, Compiled], target: Target) -> Iterator[str]:
    """Yield a row of the table per object."""
    for row in make_plan(planned, target, compiled).resources():
        found = compiled[str(row["object"])]
        loops = [loop for loop in found.loops if loop.steps]
        flops = max((loop.flops for loop in loops), default=0.0)
        barriers = max((loop.barriers / loop.steps for loop in loops), default=0.0)
        matrix = ", ".join(sorted({loop.instruction for loop in found.loops}))
        kernels = ", ".join(row["kernels"])  # type: ignore[arg-type]
        loop = f"{matrix} | {flops:.2f} | {barriers:.1f}" if loops else f"{matrix} | |"
        values = (row["warps"], row["registers"], row["spill_bytes"], row["shared_bytes"], row["occupancy"])
        yield f"| {row['object']} | {kernels} | {loop} | {' | '.join(map(str, values))} | {row['faults']} |"


def lowered(config: Mapping[str, object], target: str, quant: str, **options: Any) -> tuple[Program, Limits]:
    """The program and limits of a compile for a GPU target, from a config.json alone: no weights are read. options:
    fields of CompileOptions."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
        given = CompileOptions(model=model, output=Path(), target=target, quant=quant, **options)
        [found] = plan_model(given, [target]).targets
    return found.planned.program, found.planned.limits


def searched(program: Program, limits: Limits, target: Target) -> Objects:
    """The objects of a compile, after tilings that a check refuses were replaced."""
    plan = partial(plan_program, program, limits)
    return TilingSearch(program, limits, target, plan, lambda *_: None).run(Tuner(target, load_tuned(target)))


def measured(name: str, quant: str) -> str:
    """The Markdown part of one target and quantization."""
    target = TARGETS[name]
    program, limits = lowered(LLAMA_8B, name, quant, max_seq_len=8192)
    planned = plan_program(program, limits, Tuner(target, load_tuned(target)))
    start = time.perf_counter()
    compiled = compile_specs(planned.specs().values(), target)
    seconds = time.perf_counter() - start
    spilling = sum(one.spill_bytes > 0 for one in compiled.values())
    rows = list(object_rows(planned, compiled, target))
    faulty = sum(not row.endswith("|  |") for row in rows)
    return "\n".join([
        f"## {name}, {quant}\n",
        f"{limits.max_batch_size} sequences, {limits.max_step_tokens} tokens a step; {len(compiled)} objects in "
        f"{seconds:.0f} s (others at work), {spilling} spill, {faulty} with faults of loops.\n",
        "| phase | launches a layer | products, us (modelled) | bytes, us | FLOPs, us | of the limit |",
        "|---|---|---|---|---|---|",
        *(phase_row(program, limits, phase, target) for phase in planned.phases), "",
        "| object | kernels | instruction | FLOPs | barriers | warps | registers | spill | shared | occupancy "
        "| faults |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *rows, "",
    ])  # fmt: skip


def main() -> None:
    """Compile the parts that are not kept yet, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(n for n, t in TARGETS.items() if t.backend != "cpu"))
    parser.add_argument("--quants", default="rtn4,none,fp8")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    for quant in a.quants.split(","):
        for name in a.targets.split(","):
            kept = KEPT / f"{name}-{quant}.md"
            if not kept.is_file():
                kept.write_text(measured(name, quant))
                print(f"{name} {quant}: done", flush=True)
    if a.out:
        parts = [
            kept.read_text()
            for quant in ("rtn4", "none", "fp8", "int8")
            for name in TARGETS
            if (kept := KEPT / f"{name}-{quant}.md").is_file()
        ]
        head = a.out.read_text().partition(MARK)[0] if a.out.is_file() else ""
        made = f"{MARK}: two layers of Llama 8B, {os.cpu_count()} cores, {date.today().isoformat()}\n\n"
        a.out.write_text(head + made + "\n".join(parts))


if __name__ == "__main__":
    main()
