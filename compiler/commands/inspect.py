"""`icc inspect`: an engine as the runtime shows it, or the graph of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from ...runtime.cli import inspect as runtime
from ...runtime.cli.group import command


@command("inspect")
@click.argument("engine", metavar="ENGINE|MODEL")
@click.option("--json", "as_json", is_flag=True, help="Of an engine: print one JSON value.")
def inspect_command(engine: str, as_json: bool) -> None:
    """Show what is inside an engine, or the graph of a checkpoint."""
    path = Path(engine)
    if (path / "config.json").is_file() and not (path / "engine.json").is_file():
        from ..console import show_checkpoint

        show_checkpoint(path)
        return
    assert runtime.inspect_command.callback is not None
    runtime.inspect_command.callback(engine=engine, as_json=as_json)
