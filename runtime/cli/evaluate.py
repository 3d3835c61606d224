"""`icc eval`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..errors import UsageError
from ..options import LoadOptions
from ..progress.stream import open_display
from .fields import PATH
from .group import command
from .load import loads


@command("eval")
@click.option("--text", type=PATH, required=True, metavar="FILE", help="UTF-8 text to predict.")
@click.option("--window", type=int, show_default="1024, or the engine's limit", help="Tokens of context.")
@click.option("--stride", type=int, show_default="half a window", help="Tokens scored per window.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
@loads
def eval_command(load: LoadOptions, text: Path, window: int | None, stride: int | None, as_json: bool) -> None:
    """Measure the perplexity and bits per byte of an engine on a text."""
    try:
        with text.open(encoding="utf-8", newline="") as stream:
            content = stream.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{text} cannot be read as UTF-8 text: {error}") from error
    from ..commands.evaluate import evaluate_text
    from ..loading import open_llm

    with open_llm(load) as llm, open_display() as display, display.stage("eval") as update:
        result = evaluate_text(
            llm, content, window=window, stride=stride, progress=lambda done, total: update("", done, total)
        )
    if as_json:
        click.echo(json.dumps(result.as_json()))
        return
    click.echo(f"tokens {result.tokens}, bytes {result.bytes}")
    click.echo(f"nll per token {result.nll_per_token:.5f} nats, perplexity {result.perplexity:.4f}")
    click.echo(f"bits per byte {result.bits_per_byte:.5f}")
