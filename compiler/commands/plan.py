"""`icc plan`: what an engine would take and give, before anything is compiled."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import click

from ..options import KV_DTYPES, TASKS
from ..quantization import HEAD_FORMATS, QUANTIZATIONS

PATH = click.Path(path_type=Path)


@click.command("plan")
@click.argument("model", type=PATH)
@click.option("--target", default="cpu", show_default=True, metavar="T[,T...]", help="Targets, or all.")
@click.option("--task", type=click.Choice(TASKS), default="generate", show_default=True)
@click.option("--quant", type=click.Choice(list(QUANTIZATIONS)), default="none", show_default=True)
@click.option("--quant-head", type=click.Choice(list(HEAD_FORMATS)), default="int8", show_default=True)
@click.option("--keep", multiple=True, metavar="PATTERN", help="As for compile.")
@click.option("--kv-cache", type=click.Choice(tuple(KV_DTYPES)), default="auto", show_default=True)
@click.option("--sequences", default=16, show_default=True, help="Sequences at once (--max-batch-size).")
@click.option("--length", type=int, help="Tokens of each (--max-seq-len; default: the model's, at most 4096).")
@click.option("--max-step-tokens", default=512, show_default=True)
@click.option(
    "--memory", type=float, metavar="GIB", help="Memory to fit into (default: the target's, or what is free)."
)
@click.option(
    "--bandwidth", type=float, metavar="GB/S", help="Of memory (default: the target's; of CPUs, measured here)."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def plan_command(
    model: Path,
    target: str,
    sequences: int,
    length: int | None,
    memory: float | None,
    bandwidth: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Bytes, speed and compile time of an engine of MODEL, from its config.json alone."""
    from ..options import CompileOptions
    from ..request import check_found, find_model
    from ..targets import TARGETS, find_target

    names = [name for name in TARGETS if name != "native"] if target == "all" else target.split(",")
    for name in names:
        find_target(name)
    asked = CompileOptions(
        model=model,
        output=Path(),
        target=names[0],
        max_batch_size=sequences,
        max_seq_len=length,
        **options,
    )
    check_found(find_model(model), asked)  # before torch is imported
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own, about its internals
    from ..planning.plan import make_plan
    from ..planning.show import as_text

    plan = make_plan(asked, names, None if memory is None else int(memory * 2**30), bandwidth)
    click.echo(json.dumps(plan.as_json()) if as_json else as_text(plan))
