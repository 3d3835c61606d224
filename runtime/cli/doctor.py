"""`icc doctor`."""

from __future__ import annotations

import json

import click

from .group import command


@command("doctor")
@click.argument("engine", metavar="ENGINE")
@click.option("--hashes", is_flag=True, help="Also compare the content of every file with its sha256.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def doctor_command(engine: str, hashes: bool, as_json: bool) -> int:
    """Check whether this host can run an engine, what is missing, and what speed to expect."""
    from ..commands.doctor import as_text, diagnose

    found = diagnose(engine, hashes)
    click.echo(json.dumps(found.as_json()) if as_json else as_text(found))
    return found.exit_code
