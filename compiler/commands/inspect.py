"""`icc inspect`: an engine as the runtime shows it, or the graph of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ...runtime.cli import inspect as runtime
from ...runtime.cli.group import command
from ...runtime.format.present import is_engine


@command("inspect")
@click.argument("engine", metavar="ENGINE|MODEL")
def inspect_command(engine: str, **options: Any) -> None:
    """Show what is inside an engine, or the graph of a checkpoint."""
    path = Path(engine)
    if (path / "config.json").is_file() and not is_engine(path):
        from ..console import show_checkpoint

        show_checkpoint(path)
        return
    assert runtime.inspect_command.callback is not None
    runtime.inspect_command.callback(engine=engine, **options)


_OPTIONS = ("as_json", "memory", "sequences", "length")
inspect_command.params += [option for option in runtime.inspect_command.params if option.name in _OPTIONS]
