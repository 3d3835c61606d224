"""The cost of calibration against its lower bound: two forward passes over the text and the Hessian products.

    python benchmarks/calibration.py MODEL --quant gptq4,awq4 [--calib-sequences 32] [--keep FOLDER]

CPU seconds (user and system) of this process, so that other load on the machine matters little. For each method: the
whole quantizing stage; its part in the forward pass (the quantized layers and the ops between them); its part in the
Hessians (second moments of inputs); and the stage over the issue's bound: 1.3 times two passes and the Hessians.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import icc
from icc.compiler import phases
from icc.passes.quantize import auto, awq, damage, gptq, gptq_solver, inputs

SPENT: dict[str, float] = {}


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that its CPU seconds are added to SPENT[name]."""

    def call(*args: Any, **options: Any) -> Any:
        start = process_time()
        try:
            return function(*args, **options)
        finally:
            SPENT[name] = SPENT.get(name, 0.0) + process_time() - start

    return call


def instrument() -> None:
    """Time the quantizing stage, the pass over the model, the work at each layer in that pass, and the Hessians."""
    whole = gptq.stream

    def stream(graph: Any, sequences: Any, wanted: Any, visit: Any, *more: Any) -> None:
        timed("stream", whole)(graph, sequences, wanted, timed("visits", visit), *more)

    for module in (gptq, awq, auto):
        module.stream = stream  # type: ignore[attr-defined]
    for module in (gptq_solver, inputs, damage):
        module.gram = timed("hessians", module.gram)
    run = phases.Phases.run
    stage = timed("stage", run)
    phases.Phases.run = lambda self, name, passes: (stage if name == "quantize" else run)(self, name, passes)  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quant", default="gptq4,awq4")
    parser.add_argument("--calib-sequences", type=int, default=32)
    parser.add_argument("--keep", type=Path, help="folder in which the engines are kept")
    args = parser.parse_args()
    instrument()
    print("| | stage | forward pass | Hessians | bound | stage / bound |", "|---|---|---|---|---|---|", sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        for quant in args.quant.split(","):
            SPENT.clear()
            engine = (args.keep or Path(folder)) / f"{quant}.engine"
            icc.compile(
                args.model, engine, target="native", quant=quant, calib_sequences=args.calib_sequences, max_seq_len=1024
            )
            forward, hessians = SPENT["stream"] - SPENT["visits"], SPENT["hessians"]
            bound = 1.3 * (2 * forward + hessians)
            print(
                f"| {quant} | {SPENT['stage']:.1f} s | {forward:.1f} s | {hessians:.1f} s | {bound:.1f} s "
                f"| {SPENT['stage'] / bound:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
