"""Walk the model types of the installed transformers: traced | compiled | logits equal | refused and why.

Each type gets a tiny random checkpoint, saved and loaded like any other, in its own process with a time limit.
Equal means within TOLERANCE of transformers' float32 logits, or, if those are themselves far from its float64 logits
(random weights in twenty layers amplify rounding errors), within NOISE times that distance:

    python benchmarks/families.py [TYPE ...] [--refused] [--engine] [--plan h100] [--jobs 2] [--limit 120] [--out PATH]

A walk of some types, named or --refused, keeps the rows of PATH.json for the others. By default the types are the
causal-LM types; with --task embed the text encoders that transformers lists, whose hidden states are compared (for
engines: their mean); with --task rerank the sequence classifiers, whose scores are compared; and with --task see the
types that also read images, compiled for texts alone.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from family_compare import BUILDERS, Run, walk_one
from family_rows import Row, kept_rows, write


def _child(connection: Any, model_type: str, run: Run) -> None:
    import torch

    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        if not run.verbose:
            quiet = stack.enter_context(open("/dev/null", "w"))
            stack.enter_context(contextlib.redirect_stdout(quiet))
            stack.enter_context(contextlib.redirect_stderr(quiet))
        warnings.filterwarnings("ignore")
        connection.send(walk_one(model_type, run))


def walk(types: list[str], run: Run, jobs: int, limit: float) -> Iterator[Row]:
    """Yield the row of each type when it is done; a type that takes over `limit` seconds or crashes has a row, too."""
    context = multiprocessing.get_context("fork")  # torch and transformers are imported once, in the parent
    waiting = collections.deque(types)
    running: dict[str, tuple[Any, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.popleft()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(sender, name, run))
            process.start()
            sender.close()
            running[name] = process, receiver, time.monotonic()
        multiprocessing.connection.wait([r for _, r, _ in running.values()], timeout=1.0)
        for name, (process, receiver, started) in list(running.items()):
            row = None
            if receiver.poll():
                try:
                    row = receiver.recv()
                except EOFError:
                    process.join()
                    row = Row(name, reason=f"the process died with exit code {process.exitcode}")
            elif time.monotonic() - started > limit:
                process.kill()
                row = Row(name, reason=f"not done within {limit:.0f} s")
            if row is not None:
                process.join()
                del running[name]
                yield row


def _show(row: Row, done: int, total: int) -> None:
    state = "equal" if row.equal else "traced" if row.traced else "refused"
    error = "" if row.error is None else f" {row.error:.1e}"
    print(f"[{done}/{total}] {row.model_type:28} {state:8}{error} {row.seconds:5.1f}s {row.reason}", flush=True)


def types_of(task: str) -> list[str]:
    """The model types that transformers lists for a task."""
    from transformers.models.auto import modeling_auto as auto

    if task == "see":
        return sorted(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() - auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if task == "generate":
        return sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if task == "rerank":
        return sorted(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
    return sorted({*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, *auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES})


def main(argv: list[str]) -> int:
    """Run the command line; exit code 1 if the logits of a traced type differ from transformers'."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    parser.add_argument("--task", choices=sorted(BUILDERS), default="generate")
    parser.add_argument("--refused", action="store_true", help="only types that are not equal in PATH.json")
    parser.add_argument("--engine", action="store_true", help="also compile for the CPU and run the engine")
    parser.add_argument("--plan", action="store_true", help="also run a GPU's launch plan in Triton's interpreter")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds per type")
    parser.add_argument("--out", type=Path, help="write PATH.md and PATH.json; rows of other types stay")
    parser.add_argument("--verbose", action="store_true", help="show the output of the workers")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    if options.plan:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import torch
    import transformers
    from icc.compiler.frontend import load  # noqa: F401  (so that the workers inherit it)

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    kept = kept_rows(options.out)
    names = options.types or types_of(options.task)
    if options.refused:
        names = [name for name in names if name not in kept or not kept[name].equal]
    rows: list[Row] = []
    for row in walk(
        names, Run(options.task, options.engine, options.plan, options.verbose), options.jobs, options.limit
    ):
        rows.append(row)
        _show(row, len(rows), len(names))
        kept[row.model_type] = row.joined(kept.get(row.model_type))
        if options.out:
            write(sorted(kept.values(), key=lambda r: r.model_type), options.out, versions, options.task)
    print(f"{len(rows)} types: {sum(r.traced for r in rows)} traced, {sum(r.equal for r in rows)} equal")
    return int(any(r.traced and not r.equal for r in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
