"""`icc batch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from ..options import LoadOptions
from ..ray.options import RayOptions
from .fields import PATH, field_options, taken
from .group import command
from .load import loads


@command("batch")
@loads
@click.option("--lora", multiple=True, metavar="NAME=DIR", help="Adapter that requests name as model (repeatable).")
@click.option(
    "--judge", type=PATH, metavar="ENGINE", help="With best_of, return the answers that this engine scores highest."
)
@click.option("--engines", type=click.IntRange(1), metavar="N", help="With --ray, how many.", show_default="that fit")
@field_options(RayOptions, leave_out=("app", "scale", "proxies", "detach"))
@click.argument("source", metavar="IN.jsonl", type=PATH)
@click.argument("answers", metavar="OUT.jsonl", type=PATH)
def batch_command(
    load: LoadOptions,
    lora: tuple[str, ...],
    judge: Path | None,
    engines: int | None,
    source: Path,
    answers: Path,
    **parameters: Any,
) -> None:
    """Answer a file of requests with an engine, without a server.

    The requests have the form of OpenAI's Batch API. Requests that OUT.jsonl already answers are skipped, so a stopped
    batch can continue. With --ray, the machines of a cluster share the work. The exit code is 42 if a request failed.
    """
    from ..server.batches.offline import run_offline
    from ..server.options import adapter_paths

    ray = RayOptions(**taken(RayOptions, parameters))
    if not ray.ray:
        return run_offline(load, source, answers, adapter_paths(lora), judge)
    if judge is not None:
        raise UsageError("--judge cannot be combined with --ray, which runs several engines", "leave one of them out")
    from ..ray.batch import run_on_ray

    run_on_ray(load, source, answers, adapter_paths(lora), ray, engines)
