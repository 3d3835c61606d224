"""`icc batch`."""

from __future__ import annotations

from pathlib import Path

import click

from ..options import LoadOptions
from .fields import PATH
from .group import command
from .load import loads


@command("batch")
@loads
@click.option("--lora", multiple=True, metavar="NAME=DIR", help="Adapter that requests name as model (repeatable).")
@click.option("--judge", type=PATH, metavar="ENGINE", help="Of best_of answers give those that this engine likes best.")
@click.argument("source", metavar="IN.jsonl", type=PATH)
@click.argument("target", metavar="OUT.jsonl", type=PATH)
def batch_command(load: LoadOptions, lora: tuple[str, ...], judge: Path | None, source: Path, target: Path) -> None:
    """Answer a file of requests with an engine, without a server.

    The requests are those of OpenAI's Batch API. What OUT.jsonl has an answer to is not asked again, so that a batch
    that was stopped goes on. The exit code is 42 if a request failed.
    """
    from ..server.batches.offline import run_offline
    from ..server.options import adapter_paths

    run_offline(load, source, target, adapter_paths(lora), judge)
