"""`icc train-heads`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ...runtime.cli.fields import PATH, field_options
from ...runtime.cli.group import command
from ..interrupt import ends_at_once
from ..speculate.train_options import EAGLE, TrainHeadsOptions


@command("train-heads")
@click.argument("model", type=PATH)
@click.option("--text", type=PATH, required=True, metavar="FILE", help="UTF-8 text to train on.")
@click.option("-o", "--output", type=PATH, required=True, metavar="DIR", help="Directory to write the heads to.")
@field_options(TrainHeadsOptions)
def train_heads_command(output: Path, **options: Any) -> None:
    """Train Medusa heads, or an EAGLE-3 drafter, for the checkpoint directory MODEL.

    The same command continues a training that was interrupted.
    """
    chosen = TrainHeadsOptions(output=output, **options)
    with ends_at_once():
        from ..console import ConsoleReporter, show_accuracy
        from ..speculate.train import train_heads
        from ..speculate.train_eagle import train_eagle

        with ConsoleReporter() as reporter:
            accuracy = (train_eagle if chosen.kind == EAGLE else train_heads)(chosen, reporter)
    show_accuracy(output, "eagle" if chosen.kind == EAGLE else "medusa", accuracy)
