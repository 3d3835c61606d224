"""`icc plan`: what an engine would take and give, before anything is compiled."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import click

from ...runtime.cli.fields import PATH, field_options, taken
from ...runtime.cli.group import command
from ...runtime.cli.traffic import plan_traffic, taken_traffic, traffic_options
from ...runtime.settings import settings
from ..interrupt import ends_at_once
from ..options import CompileOptions
from ..targets import AUTO, TARGETS, find_target

_LEFT_OUT = [name for name, found in settings(CompileOptions).items() if not found.plan]


@command("plan")
@click.argument("model", type=PATH, metavar="MODEL|ENGINE")
@click.option("--target", default="cpu", metavar="TARGET[,TARGET...]", help="Targets to plan for, or all.")
@click.option(
    "--sequences",
    type=int,
    show_default="the target's",
    help="Sequences at once (--max-batch-size of compile).",
)
@click.option(
    "--length",
    type=int,
    show_default="the model's, at most 4096",
    help="Tokens of each (--max-seq-len of compile).",
)
@field_options(CompileOptions, _LEFT_OUT)
@click.option("--memory", type=float, metavar="GIB", show_default="the target's", help="Memory to fit into.")
@click.option(
    "--bandwidth",
    type=float,
    metavar="GB/S",
    show_default="the target's; of CPUs, measured here",
    help="Of that memory.",
)
@click.option(
    "--devices",
    type=click.IntRange(1, 64),
    metavar="N",
    show_default="one",
    help="Compare replicas and ranks on N devices; --memory and --bandwidth are per device.",
)
@traffic_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def plan_command(
    model: Path,
    target: str,
    sequences: int | None,
    length: int | None,
    memory: float | None,
    bandwidth: float | None,
    devices: int | None,
    as_json: bool,
    **parameters: Any,
) -> None:
    """Estimate bytes, speed and compile time of an engine of MODEL, from its config.json alone; or, with --traffic, how
    many replicas of ENGINE, in which roles, the requests need."""
    asked_traffic = taken_traffic(parameters)
    if asked_traffic["traffic"] is not None:
        plan_traffic(model, as_json, **asked_traffic)
        return
    from ..request import check_found, find_model

    names = [name for name in TARGETS if name != "native"] if target == "all" else target.split(",")
    names = [find_target(name).name if name == AUTO else name for name in names]
    for name in names:
        find_target(name)
    fields = taken(CompileOptions, parameters)
    asked = CompileOptions(
        model=model, output=Path(), target=names[0], max_batch_size=sequences, max_seq_len=length, **fields
    )
    check_found(find_model(model), asked)  # before torch is imported
    with ends_at_once():
        warnings.filterwarnings("ignore", category=FutureWarning)  # torch warns about its own internals
        from ..planning.plan import make_plan
        from ..planning.show import as_text

        plan = make_plan(asked, names, None if memory is None else int(memory * 2**30), bandwidth, devices)
    click.echo(json.dumps(plan.as_json()) if as_json else as_text(plan))
