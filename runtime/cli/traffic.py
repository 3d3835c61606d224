"""`icc plan --traffic`: how many replicas of which role meet a service level."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ..errors import UsageError
from ..format.present import is_engine
from ..options import LoadOptions
from ..progress.stream import open_display
from .fields import PATH, Read

if TYPE_CHECKING:
    from ..server.sizing.sizing import Outcome, ServiceLevel
    from ..server.sizing.step_table import StepTable

_NAMES = ("traffic", "slo", "step_costs", "write_step_costs", "max_replicas", "threads")


def _slo(text: str) -> ServiceLevel:
    from ..server.sizing.sizing import read_slo

    return read_slo(text)


def traffic_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds the options of a traffic simulation to a command; `taken_traffic` removes them from its
    parameters."""
    for option in (
        click.option(
            "--threads", type=click.IntRange(1), metavar="N", help="With --traffic: kernel threads of a replica."
        ),
        click.option(
            "--max-replicas", type=click.IntRange(1, 64), default=8, help="With --traffic: the most replicas to try."
        ),
        click.option(
            "--write-step-costs", type=PATH, metavar="FILE", help="With --traffic: write the measured costs here."
        ),
        click.option(
            "--step-costs",
            type=PATH,
            metavar="FILE",
            help="With --traffic: read costs from such a file; measure nothing.",
        ),
        click.option(
            "--slo",
            type=Read(_slo),
            metavar="ttft=S,itl=S",
            help="Limits that 99 % of requests must keep: ttft=1s,itl=50ms.",
        ),
        click.option(
            "--traffic", type=PATH, metavar="FILE", help="A file of requests: find how many replicas they need."
        ),
    ):
        function = option(function)
    return function


def taken_traffic(parameters: dict[str, Any]) -> dict[str, Any]:
    """The traffic options from a command's parameters, from which they are removed."""
    return {name: parameters.pop(name) for name in _NAMES}


def plan_traffic(
    path: Path,
    as_json: bool,
    *,
    traffic: Path,
    slo: ServiceLevel | None,
    step_costs: Path | None,
    write_step_costs: Path | None,
    max_replicas: int,
    threads: int | None,
) -> None:
    """Simulate the traffic on fleets of the engine's replicas; print the results and the fleet to take. path: the
    engine. step_costs: the file to read the costs of steps from; None: measure them. write_step_costs: the file to
    write them to; None: do not. threads: None for all cores. UsageError if a file cannot be read, the service level is
    missing, or there is neither an engine nor step costs."""
    from ..server.sizing.sizing import best, size
    from ..server.sizing.step_table import StepTable
    from ..server.sizing.traffic import read_traffic

    if slo is None:
        raise UsageError("--traffic needs a service level", "give --slo ttft=1s,itl=50ms")
    arrivals = read_traffic(traffic)
    if write_step_costs is not None and not write_step_costs.parent.is_dir():  # refused before a minute of measuring
        raise UsageError(f"--write-step-costs: {write_step_costs.parent} is no directory", "make it first")
    with open_display() as display:
        if step_costs is not None:
            table = StepTable.read(step_costs)
        else:
            with display.stage("step costs") as progress:
                table = _measured(path, threads, progress)
        if write_step_costs is not None:
            table.write(write_step_costs)
        with display.stage("fleets") as progress:
            found = size(table, arrivals, slo, max_replicas, lambda one: progress(_name(one), 0, 0))
    chosen = best(found, slo)
    if as_json:
        click.echo(
            json.dumps({"fleets": [msgspec.to_builtins(one) for one in found], "take": msgspec.to_builtins(chosen)})
        )
        return
    click.echo(f"{len(arrivals)} requests in {arrivals[-1].time - arrivals[0].time:.1f} s; milliseconds")
    click.echo(f"{'replicas':28}{'TTFT p50':>10}{'p99':>10}{'ITL p50':>10}{'p99':>10}")
    for one in found:
        values = [one.ttft["p50"], one.ttft["p99"], one.itl.get("p50", 0.0), one.itl.get("p99", 0.0)]
        kept = "  keeps it" if one.meets else ""
        click.echo(f"{_name(one):28}" + "".join(f"{1e3 * value:>10.1f}" for value in values) + kept)
    options = f"--replicas {chosen.fleet.replicas}"
    if chosen.fleet.prefills:
        options += f" --prefill-replicas {chosen.fleet.prefills}"
    if chosen.meets:
        click.echo(f"take {options}")
    else:
        click.echo(f"no fleet of up to {max_replicas} replicas keeps it; the nearest is {options}")


def _measured(path: Path, threads: int | None, progress: Callable[[str, int, int], None]) -> StepTable:
    if not is_engine(path):
        raise UsageError(
            f"{path} is no engine, and step costs are measured on one",
            "compile it first, or give --step-costs FILE, written with --write-step-costs",
        )
    from ..loading import open_llm
    from ..server.sizing.calibrate import calibrate

    with open_llm(LoadOptions(path, threads=threads, spec="none")) as llm:
        return calibrate(llm, progress)


def _name(outcome: Outcome) -> str:
    answering = outcome.fleet.replicas - outcome.fleet.prefills
    if not outcome.fleet.prefills:
        return f"{answering}"
    return f"{outcome.fleet.replicas}: {outcome.fleet.prefills} prefill, {answering} decode"
