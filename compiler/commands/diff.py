"""`icc diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...runtime.cli.fields import PATH
from ...runtime.cli.group import command
from ..interrupt import ends_at_once

if TYPE_CHECKING:
    from ..differences import EngineDifferences

_SHOWN = 20  # differences of each kind; --json prints all


@command("diff")
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value, with all tensors.")
def diff_command(first: Path, second: Path, as_json: bool) -> None:
    """Show how two engines differ: options, program, kernels, tensors by the norm of their difference, answers."""
    from ...runtime.format.present import check_present

    for path in (first, second):
        check_present(path)
    with ends_at_once():
        from ...runtime.cli.facts import as_text
        from ..console import ConsoleReporter
        from ..differences import compare_engines

        with ConsoleReporter() as reporter, reporter.stage("compare"):
            found = compare_engines(first, second, reporter.progress)
    if as_json:
        click.echo(json.dumps(found.as_json()))
    else:
        click.echo("the engines are the same" if found.equal else as_text(shown_differences(found)))


def shown_differences(found: EngineDifferences) -> dict[str, object]:
    """The differences, shortened, for people."""
    facts: dict[str, Any] = {}
    for name, pairs in (("options", found.options), ("facts", found.facts)):
        if pairs:
            facts[name] = {key: f"{_value(a)} -> {_value(b)}" for key, (a, b) in pairs.items()}
    facts["program"] = found.program or "the same"
    facts["kernels"] = _first(found.kernels) or "the same"
    if found.tensors:
        rows = [
            f"{one.name}  {'-' if one.norm is None else format(one.norm, '.3g')}"
            + ("" if one.formats[0] == one.formats[1] else f"  {one.formats[0]} -> {one.formats[1]}")
            for one in found.tensors
        ]
        facts[f"tensors that differ ({len(rows)}; {found.equal_tensors} are the same), |b - a| / |a|"] = _first(rows)
    else:
        facts["tensors"] = f"{found.equal_tensors}, the same"
    if found.answers is not None:
        one = found.answers
        said = "too far apart to compare" if one.deviation is None else f"off by {one.deviation:.3g} of their spread"
        facts["answers"] = f"{said}; the best token is the same at {one.same_best} of {one.positions} positions"
    else:
        facts["answers"] = "to other prompts"
    if found.files:
        facts["other files"] = _first(found.files)
    return facts


def _first(rows: list[str]) -> list[str]:
    left = len(rows) - _SHOWN
    return rows[:_SHOWN] + ([f"and {left} more: --json"] if left > 0 else [])


def _value(value: Any) -> str:
    return "default" if value is None else json.dumps(value) if isinstance(value, list | dict) else str(value)
