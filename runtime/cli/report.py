"""`icc report`."""

from __future__ import annotations

from pathlib import Path

import click

from .fields import PATH
from .group import command


@command("report")
@click.argument("engine", metavar="ENGINE")
@click.option("--html", type=PATH, required=True, metavar="FILE", help="Where to write the page; - is standard output.")
def report_command(engine: str, html: Path) -> None:
    """Show what the compiler did, as one HTML page.

    The graph by stage, roofline by op and layer, memory over the step, quantization error by layer, and what was fused
    and refused.
    """
    from ..report.write import write_report

    size = write_report(engine, html)
    if str(html) != "-":
        click.echo(f"{html}: {size / 1024:.0f} KiB", err=True)
