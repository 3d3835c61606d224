"""`icc verify`: as the runtime does it, and by compiling again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import click

from ...runtime.cli import verify as runtime
from ...runtime.cli.fields import PATH
from ...runtime.cli.group import command
from ..interrupt import ends_at_once


@command("verify")
@click.argument("engine", metavar="ENGINE")
@click.option("--rebuild", type=PATH, metavar="MODEL", help="Compile MODEL with ENGINE's options; compare all files.")
@click.option("--calib", type=PATH, metavar="FILE", help="With --rebuild: the calibration text, if ENGINE has one.")
@click.option("--gate-text", type=PATH, metavar="FILE", help="With --rebuild: the text of --gate, if ENGINE has one.")
@click.option("--lora", type=PATH, metavar="DIR", help="With --rebuild: the adapter that was merged, if any.")
@click.option("--spec", metavar="medusa:DIR", help="With --rebuild: the draft heads, if any.")
def verify_command(
    engine: str,
    rebuild: Path | None,
    calib: Path | None,
    gate_text: Path | None,
    lora: Path | None,
    spec: str | None,
    **options: Any,
) -> None:
    """Compare every file of an engine with its digest in the manifest. Works on any machine.

    With --key, the engine must contain nothing that was not signed. With --rebuild, MODEL is compiled again with the
    engine's options, compiled prompts and schemas, and every digest must be the same.
    """
    assert runtime.verify_command.callback is not None
    runtime.verify_command.callback(engine=engine, **options)
    if rebuild is None:
        return
    with ends_at_once():
        from ..console import ConsoleReporter
        from ..origins import rebuild as compile_again

        warnings.filterwarnings("ignore", category=FutureWarning)  # torch warns about its own internals
        given = {"calib": calib, "gate_text": gate_text, "lora": lora, "spec": spec}
        with ConsoleReporter() as reporter:
            compile_again(Path(engine), rebuild, given, reporter)
    click.echo(f"a compile of {rebuild} gives the same engine", err=True)


verify_command.params += [option for option in runtime.verify_command.params if option.name in ("key", "as_json")]
