"""`icc tune`."""

from __future__ import annotations

from pathlib import Path

import click

from ...runtime.cli.fields import PATH
from ...runtime.cli.group import command
from ..interrupt import ends_at_once


@command("tune")
@click.argument("engine", type=PATH)
@click.option("-o", "--output", type=PATH, show_default="ENGINE's target, with .json", help="Tuning file to write.")
def tune_command(engine: Path, output: Path | None) -> None:
    """Measure kernel tilings on this machine's GPU.

    Later compiles read the file that ICC_TUNING names.
    """
    with ends_at_once():
        from ..console import ConsoleReporter
        from ..measure import tune_engine

        with ConsoleReporter() as reporter, reporter.stage("tune"):
            file, found = tune_engine(engine, output, reporter.progress)
    click.echo(f"{file}: {len(found.tilings)} tilings measured on {found.device}; use it with ICC_TUNING={file}")
