"""The commands `serve` and `batch`: their options, and a clear word where the server is not installed."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import MissingExtraError
from .load import load_options

_EXTRA_MODULES = (
    "fastapi", "httptools", "jsonschema_rs", "llguidance", "minijinja", "prometheus_client", "python_multipart",
    "starlette", "uvicorn", "uvloop",
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
        from ..server.http.serve import ServeOptions, serve
    except ModuleNotFoundError as error:
        raise missing(error) from error
    return serve(
        ServeOptions(
            load_options(arguments),
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
    except ModuleNotFoundError as error:
        raise missing(error) from error
    return run_offline(load_options(arguments), arguments.input, arguments.output)


def missing(error: ModuleNotFoundError) -> Exception:
    """The error for a module that the extra `serve` installs; any other error as it is."""
    name = (error.name or "").split(".")[0]
    if name in _EXTRA_MODULES:
        return MissingExtraError(f"serving needs {name}, which is not installed", "pip install 'icc[serve]'")
    if error.name and error.name.endswith("server"):
        return MissingExtraError("an engine's own runtime has no server", "pip install 'icc[serve]' and use icc serve")
    return error
