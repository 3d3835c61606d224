"""`icc refit`."""

from __future__ import annotations

import warnings
from pathlib import Path

import click

from ...runtime.cli.fields import PATH
from ...runtime.cli.group import command
from ..heap import keep_freed_memory
from ..interrupt import ends_at_once


@command("refit")
@click.argument("engine", type=PATH)
@click.argument("checkpoint", type=PATH)
@click.option("-o", "--output", type=PATH, show_default="ENGINE, which is replaced", help="Engine directory to write.")
@click.option("--force", is_flag=True, help="Replace an engine that exists at OUTPUT.")
@click.option("--calib", type=PATH, metavar="FILE", help="The text to calibrate on, if ENGINE was compiled with one.")
@click.option("--gate-text", type=PATH, metavar="FILE", help="The text of --gate, if ENGINE was compiled with one.")
@click.option("--lora", type=PATH, metavar="DIR", help="The adapter to merge, if ENGINE was compiled with one.")
@click.option("--spec", metavar="DRAFTER:DIR", help="The drafter, likewise.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of the summary.")
def refit_command(
    engine: Path,
    checkpoint: Path,
    output: Path | None,
    force: bool,
    calib: Path | None,
    gate_text: Path | None,
    lora: Path | None,
    spec: str | None,
    as_json: bool,
) -> None:
    """Put the weights of CHECKPOINT into ENGINE, and keep its program and kernels.

    CHECKPOINT must have the shapes that ENGINE was compiled from; its weights are quantized with ENGINE's options.
    Quantizations that read a text read it again. A checkpoint that does not fit is refused, and ENGINE stays as it was.
    """
    from ..several import refit_all

    given = {"calib": calib, "gate_text": gate_text, "lora": lora, "spec": spec}
    with ends_at_once():
        from ..console import ConsoleReporter, show_reports

        keep_freed_memory()
        warnings.filterwarnings("ignore", category=FutureWarning)  # torch warns about its own internals
        with ConsoleReporter() as reporter:
            done = refit_all(engine, checkpoint, output, force, given, reporter)
    show_reports(done, reporter, as_json)
