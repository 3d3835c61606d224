"""`icc compile`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import click

from ...runtime.cli.fields import PATH, field_options, taken
from ...runtime.cli.group import command
from ..heap import keep_freed_memory
from ..interrupt import ends_at_once
from ..options import CompileOptions, default_output
from ..several import compile_all, for_targets


@command("compile")
@click.argument("model", type=PATH)
@click.option(
    "-o",
    "--output",
    type=PATH,
    show_default="MODEL.engine",
    help="Engine to write: a directory, or one file if it ends in .icc.",
)
@field_options(CompileOptions)
@click.option("--explain", metavar="PASS", help="Print where and why a pass or rule refused.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of the summary.")
def compile_command(model: Path, output: Path | None, explain: str | None, as_json: bool, **parameters: Any) -> None:
    """Compile the checkpoint MODEL, a directory or a model of the Hugging Face hub, to an engine."""
    from ...passes.registry import check_explainable
    from ..request import check

    if explain:
        check_explainable(explain)
    fields = taken(CompileOptions, parameters)
    # checks that do not need torch come before its import
    chosen = [check(options).options for options in for_targets(model, output or default_output(model), fields)]
    with ends_at_once():
        from ..console import ConsoleReporter, show_explanation, show_reports

        keep_freed_memory()
        warnings.filterwarnings("ignore", category=FutureWarning)  # torch warns about its own internals
        with ConsoleReporter() as reporter:
            done = compile_all(chosen, reporter)
    show_reports(done, reporter, as_json)
    if explain:
        for _, report in done:
            show_explanation(report, explain)
