"""The modelled time of a decode step of one sequence of Llama 8B: with launches, and with a layer as one kernel.

    python benchmarks/step_model.py [--targets h100,h200] [--quants rtn4,none]

Needs no GPU and reads no weights. before: stages with the tilings of their launches, which prefetch no weights while
they wait (the first version of the step kernel); now: the current version. Attention is assumed to take ATTENTION us
besides its launch, and launches outside layers and head REST us: the remainder of a step measured on an H100.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from gpu_resources import LLAMA_8B, lowered
from icc.compiler.backends.triton.kernels.linear import LinearKernel
from icc.compiler.backends.triton.plan import kernel_of, plan_program
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.backends.triton.tiling.estimate import Estimate
from icc.compiler.backends.triton.tiling.machine import LATENCY, LAUNCH, Machine
from icc.compiler.backends.triton.tiling.tuned import load_tuned
from icc.compiler.backends.triton.tiling.whole import BETWEEN, LAUNCHES, MERGE, WholeTilings
from icc.compiler.targets import TARGETS, Target

ATTENTION, REST, LAYERS = 5.0, 8.0, 32
HEAD = 128256 * 4096  # weights; 8-bit if the others have 4 bits
LAYER = 6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096


def model(target: Target, quant: str) -> tuple[WholeTilings, float, int]:
    """A layer's stages, the seconds of the head, and the programs of the step kernel per multiprocessor."""
    program, limits = lowered(LLAMA_8B, target.name, quant, max_seq_len=8192)
    tuner, shape = Tuner(target, load_tuned(target)), Shape(1, True)
    [phase] = plan_program(program, limits, tuner, [shape], step_kernel=True).phases
    kernels = {name: kernel_of(step) for name, step in program.kernel_steps.items()}
    run = phase.runs[0]
    products = tuple(kernels[stage.name].stage_product(shape, tuner) for stage in run.stages)
    [*_, last] = (kernel for kernel in kernels.values() if isinstance(kernel, LinearKernel))
    head = last.stage_product(shape, tuner)
    assert head is not None
    found = WholeTilings(Machine(target), products, sum(bool(stage.waits) for stage in run.stages))
    return found, Estimate(found.machine).seconds(head.facts, head.launched), run.choice[1]["resident"]


def before(found: WholeTilings) -> float:
    """Seconds of a layer's products and waits in the first version of the step kernel."""
    held = min(found.room(one, one.launched) for one in found.products)
    products = sum(found._stage_seconds(one, one.launched, held) for one in found.products)
    return LAUNCH + BETWEEN + products + found.waits * (MERGE + LATENCY)


def rows(target: Target, quant: str) -> Iterator[str]:
    """Yield the rows of the table for a target and quantization."""
    found, head, held = model(target, quant)
    bits, head_bits = (4.25, 8.25) if quant == "rtn4" else (16, 16)
    limit = (LAYERS * LAYER * bits + HEAD * head_bits) / 8 / (target.bandwidth * 1e9)
    kinds = {"launches": found.seconds(LAUNCHES), "before": before(found), "now": found.seconds({"resident": held})}
    for name, seconds in kinds.items():
        step = LAYERS * (seconds + ATTENTION * 1e-6) + head + REST * 1e-6
        us = f"{seconds * 1e6:.1f} | {step * 1e6:.0f}"
        yield f"| {target.name} {quant} | {name} | {us} | {1 / step:.0f} | {100 * limit / step:.0f} % |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="h100,h200")
    parser.add_argument("--quants", default="rtn4,none")
    a = parser.parse_args()
    print("| target, weights | a layer as | products, launches, waits, us | step, us | tokens/s | of the bytes' time |")
    print("|---|---|---|---|---|---|")
    for quant in a.quants.split(","):
        for name in a.targets.split(","):
            print("\n".join(rows(TARGETS[name], quant)), flush=True)


if __name__ == "__main__":
    main()
