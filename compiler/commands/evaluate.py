"""`icc eval`: the runtime's, and the unquantized checkpoint beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ...runtime.cli import evaluate as runtime
from ...runtime.cli.fields import PATH
from ...runtime.cli.group import Command


def _evaluate(baseline: Path | None, **parameters: Any) -> None:
    assert runtime.eval_command.callback is not None
    runtime.eval_command.callback(**parameters)
    if baseline is None:
        return
    from ..measure import perplexity

    result = perplexity(baseline, Path(parameters["engine"]), parameters["text"])
    click.echo(
        f"baseline {baseline}: nll per token {result.nll_per_token:.5f} nats, perplexity {result.perplexity:.4f}, "
        f"bits per byte {result.bits_per_byte:.5f}"
    )


_BASELINE = click.Option(
    ["--baseline"], type=PATH, metavar="MODEL", help="Also evaluate this unquantized checkpoint and compare."
)
eval_command = Command(
    "eval", params=[_BASELINE, *runtime.eval_command.params], callback=_evaluate, help=runtime.eval_command.help
)
