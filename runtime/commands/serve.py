"""The commands `serve` and `batch`: their options, and a clear word where the server is not installed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import MissingExtraError, UsageError

_EXTRA_MODULES = (
    "fastapi", "httptools", "llguidance", "minijinja", "prometheus_client", "python_multipart", "starlette", "uvicorn",
    "uvloop",
)  # fmt: skip


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; others than this machine need keys")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--name", help="what requests call the model (default: the engine directory's name)")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="accepted API keys, one per line")
    parser.add_argument("--max-queue", type=int, default=1024, help="completions accepted beyond a full batch")
    parser.add_argument("--max-queue-tokens", type=int, default=4 << 20, help="tokens of all that is accepted")
    parser.add_argument("--max-wait", type=float, metavar="S", help="refuse who would wait longer (default: never)")
    parser.add_argument("--watchdog", type=float, default=10.0, metavar="S", help="an engine silent for so long hangs")
    parser.add_argument("--batch-store", type=Path, metavar="FILE", help="SQLite file; with it there is a Batch API")
    parser.add_argument("--max-seconds", type=float, metavar="S", help="a request ends after so long (default: never)")
    parser.add_argument("--drain", type=float, default=30.0, metavar="S", help="time to finish requests after SIGTERM")


def run_serve(arguments: argparse.Namespace) -> int:
    try:
        from ..server.engine.worker_main import LoadOptions
        from ..server.http.serve import ServeOptions, serve
    except ModuleNotFoundError as error:
        raise missing(error) from error
    return serve(
        ServeOptions(
            LoadOptions(**_load(arguments)),
            arguments.host,
            arguments.port,
            arguments.name,
            arguments.api_key_file,
            arguments.max_queue,
            arguments.max_queue_tokens,
            arguments.watchdog,
            arguments.drain,
            arguments.batch_store,
            arguments.max_seconds,
            arguments.max_wait,
        )
    )


def add_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN.jsonl", help="requests, as for OpenAI's Batch API")
    parser.add_argument(
        "output", type=Path, metavar="OUT.jsonl", help="answers; what it has already is not asked again"
    )


def run_batch(arguments: argparse.Namespace) -> int:
    try:
        from ..server.batches.offline import run_offline
        from ..server.engine.worker_main import LoadOptions
    except ModuleNotFoundError as error:
        raise missing(error) from error
    return run_offline(LoadOptions(**_load(arguments)), arguments.input, arguments.output)


def _load(arguments: argparse.Namespace) -> dict[str, Any]:
    """How to load the engine, as LoadOptions has it."""
    return {
        "engine": str(arguments.engine),
        "threads": arguments.threads,
        "isa": arguments.isa,
        "verify": not arguments.no_verify,
        "kv_bytes": None if arguments.kv_mib is None else arguments.kv_mib << 20,
        "swap_bytes": swap_bytes(arguments),
        "spec": arguments.spec,
        "spec_accept": accepting(arguments),
    }


def accepting(arguments: argparse.Namespace) -> str:
    """The option --spec-accept, with a warning where it changes what comes out."""
    from ..speculate.typical import read_acceptance

    if read_acceptance(arguments.spec_accept) is not None:
        print(
            "warning: --spec-accept typical is lossy: outputs no longer have the model's distribution", file=sys.stderr
        )
    return arguments.spec_accept


def swap_bytes(arguments: argparse.Namespace) -> int | None:
    """The option --swap-gib in bytes. UsageError if it is no size."""
    gib = arguments.swap_gib
    if gib is None:
        return None
    if not 0 <= gib < 1 << 20:
        raise UsageError(f"--swap-gib {gib}: must be 0 or more")
    return int(gib * 2**30)


def missing(error: ModuleNotFoundError) -> Exception:
    """The error for a module that the extra `serve` installs; any other error as it is."""
    name = (error.name or "").split(".")[0]
    if name in _EXTRA_MODULES:
        return MissingExtraError(f"serving needs {name}, which is not installed", "pip install 'icc[serve]'")
    if error.name and error.name.endswith("server"):
        return MissingExtraError("an engine's own runtime has no server", "pip install 'icc[serve]' and use icc serve")
    return error
