"""How the commands say which engine to load, and how."""

from __future__ import annotations

import argparse
import sys

from ..errors import UsageError
from ..options import LoadOptions
from ..speculate.modes import LOSSLESS


def add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, help="kernel threads (default: physical cores)")
    parser.add_argument("--isa", help="use this kernel library instead of the best one (also: ICC_ISA)")
    parser.add_argument(
        "--kv-mib", type=int, help="memory for the KV cache (default: a full batch, at most 40 %% of RAM)"
    )
    parser.add_argument(
        "--swap-gib",
        type=float,
        help="of a GPU engine: host memory for the KV of preempted requests; 0: it is computed again "
        "(default: if the cache can run out, 4, at most 25 %% of RAM)",
    )
    parser.add_argument(
        "--spec", help="speculation: none, medusa, layer-skip, ngram or draft:ENGINE (default: as compiled)"
    )
    parser.add_argument(
        "--spec-accept",
        default=LOSSLESS,
        metavar="HOW",
        help="guesses that are kept: lossless (default), or typical[:EPSILON,DELTA], which is lossy: sampled requests "
        "keep guesses more probable than min(EPSILON, DELTA / exp(entropy)), by default 0.09,0.3",
    )
    parser.add_argument("--no-verify", action="store_true", help="do not compare files with their hashes")


def load_options(arguments: argparse.Namespace) -> LoadOptions:
    """The options that were given, with a warning where they change what comes out. UsageError."""
    options = LoadOptions(
        arguments.engine,
        threads=arguments.threads,
        isa=arguments.isa,
        verify=not arguments.no_verify,
        kv_bytes=None if arguments.kv_mib is None else arguments.kv_mib << 20,
        swap_bytes=_swap_bytes(arguments.swap_gib),
        spec=arguments.spec,
        spec_accept=arguments.spec_accept,
    )
    if options.acceptance is not None:
        print(
            "warning: --spec-accept typical is lossy: outputs no longer have the model's distribution", file=sys.stderr
        )
    return options


def _swap_bytes(gib: float | None) -> int | None:
    if gib is None:
        return None
    if not 0 <= gib < 1 << 20:
        raise UsageError(f"--swap-gib {gib}: must be 0 or more")
    return int(gib * 2**30)
