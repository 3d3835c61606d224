"""`icc inspect` of an engine."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..errors import UsageError
from ..format.present import check_present
from .facts import as_text
from .group import command


@command("inspect")
@click.argument("engine", metavar="ENGINE")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
@click.option(
    "--memory", is_flag=True, help="Bytes that the engine takes for a load: weights, buffers, every KV group."
)
@click.option("--sequences", type=int, help="With --memory: number of sequences at once.  [default: the largest batch]")
@click.option("--length", type=int, help="With --memory: tokens of each sequence.  [default: the longest]")
def inspect_command(engine: str, as_json: bool, memory: bool, sequences: int | None, length: int | None) -> None:
    """Show what is inside an engine: limits, memory, kernels, bytes."""
    check_present(Path(engine))
    if not memory and (sequences, length) != (None, None):
        raise UsageError("--sequences and --length need --memory", "add --memory")
    from ..commands.inspect import describe_engine

    if memory:
        from ..commands.memory import certify

        facts = certify(engine, sequences, length)
    else:
        facts = describe_engine(engine)
    click.echo(json.dumps(facts) if as_json else as_text(facts))
