"""`icc train-heads`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ...runtime.cli.fields import PATH, field_options
from ...runtime.cli.group import command
from ..interrupt import ends_at_once
from ..speculate.train_options import EAGLE, MEDUSA, UNO, TrainHeadsOptions


@command("train-heads")
@click.argument("model", type=PATH)
@click.option("--text", type=PATH, required=True, metavar="FILE", help="UTF-8 text to train on.")
@click.option("-o", "--output", type=PATH, required=True, metavar="DIR", help="Directory to write the heads to.")
@field_options(TrainHeadsOptions)
def train_heads_command(output: Path, **options: Any) -> None:
    """Train Medusa heads, an EAGLE-3 drafter, or an adapter for UNO, for the checkpoint directory MODEL.

    The same command continues a training that was interrupted.
    """
    chosen = TrainHeadsOptions(output=output, **options)
    with ends_at_once():
        from ..console import ConsoleReporter, show_accuracy
        from ..speculate.train import train_heads
        from ..speculate.train_eagle import train_eagle
        from ..speculate.train_uno import train_uno

        train = {MEDUSA: train_heads, EAGLE: train_eagle, UNO: train_uno}[chosen.kind]
        with ConsoleReporter() as reporter:
            accuracy = train(chosen, reporter)
    hints = {
        MEDUSA: f"compile with --spec medusa:{output}",
        EAGLE: f"compile with --spec eagle:{output}",
        UNO: f"compile with --adapters 1x{chosen.rank}, and run with --spec uno:{output}",
    }
    show_accuracy(output, hints[chosen.kind], accuracy)
