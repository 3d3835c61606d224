"""The argument ENGINE and the options of LoadOptions, for commands that load an engine."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from ..choosing import of_this_machine
from ..executor.cpu.cores import usable_cores
from ..format.present import check_present
from ..options import LoadOptions
from .fields import field_options, taken


def loads(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for a command that loads an engine: adds ENGINE and the options of LoadOptions, passed on as `load`."""
    return loads_but()(function)


def loads_but(*leave_out: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As `loads`, without the options in `leave_out`, which the command defines itself with another meaning."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(engine: str, **parameters: Any) -> Any:
            own = {name: parameters.pop(name) for name in leave_out}
            load = LoadOptions(engine, **taken(LoadOptions, parameters))
            check_present(Path(engine))
            load = of_this_machine(load)
            # numpy would start threads that nothing here uses
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
            warn(_warnings(load))
            return function(load=load, **own, **parameters)

        return click.argument("engine", metavar="ENGINE")(field_options(LoadOptions, leave_out)(call))

    return decorate


def warn(warnings: Iterable[str]) -> None:
    """Print the warnings on stderr."""
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)


def _warnings(load: LoadOptions) -> Iterator[str]:
    """Warnings about consequences of the options that a user may not want."""
    if load.acceptance is not None:
        yield "--spec-accept typical is lossy: outputs no longer have the model's distribution"
    yield from thread_warnings(load)


def thread_warnings(load: LoadOptions) -> Iterator[str]:
    """A warning if there are more threads than cores."""
    if load.threads is not None and load.threads > (cores := usable_cores(load.core_set)):
        yield f"--threads {load.threads} is slower than {cores}, the number of cores that this process may use"
