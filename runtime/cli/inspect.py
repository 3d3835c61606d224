"""`icc inspect` of an engine."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..format.present import check_present
from .group import command


@command("inspect")
@click.argument("engine", metavar="ENGINE")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def inspect_command(engine: str, as_json: bool) -> None:
    """Show what is inside an engine: limits, memory, kernels, bytes."""
    check_present(Path(engine))
    from ..commands.inspect import as_text, describe_engine

    facts = describe_engine(engine)
    click.echo(json.dumps(facts) if as_json else as_text(facts))
