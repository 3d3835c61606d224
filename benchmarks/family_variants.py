"""Random configurations of causal-LM types, beyond the published ones: does icc compute the logits of transformers?

    python benchmarks/family_variants.py [TYPE ...] [--cases 20] [--seed 0] [--engine] [--jobs 1]

`variants.py` draws them. Each is compared as `families.py` compares a type: transformers' float32 logits against those
of the reference interpreter and, with --engine, of a CPU engine that reads the prompt in chunks and its end token by
token. Exit code 1 if any differ or if icc crashed; refusals are printed.
"""

from __future__ import annotations

import argparse
import sys
import warnings

from families import walk
from family_compare import Run

TOKENS = 37


def main(argv: list[str]) -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    parser.add_argument("--cases", type=int, default=20, help="configurations for each named type, or in total")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds per case")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    import torch
    import transformers
    from icc.compiler.frontend import load  # noqa: F401  (so that the workers inherit it)
    from transformers.models.auto import modeling_auto

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    seeds = range(options.seed, options.seed + options.cases)
    every = sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    names = [f"{t}#{s}" for s in seeds for t in options.types] or [f"{every[s % len(every)]}#{s}" for s in seeds]
    wrong = 0
    for row in walk(names, Run(engine=options.engine, tokens=TOKENS, drawn=True), options.jobs, options.limit):
        failed = (row.traced and not row.equal) or row.reason.startswith(("icc crashed", "the process died"))
        wrong += failed
        errors = " ".join(f"{e:.0e}" for e in (*row.errors, row.noise) if e is not None)
        state = "WRONG" if failed else "equal" if row.equal else "refused"
        print(f"{row.model_type:24} {state:8} {errors:20} {row.seconds:5.1f}s {row.reason} {row.changed}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
