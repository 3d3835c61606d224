"""How commands say which engine to load, and how: the argument ENGINE and the options of LoadOptions."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from ..executor.cpu.cores import usable_cores
from ..format.present import check_present
from ..options import LoadOptions
from .fields import field_options, taken


def loads(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command that loads an engine: it has ENGINE and the options of LoadOptions, and gets them as `load`."""

    @functools.wraps(function)
    def call(engine: str, **parameters: Any) -> Any:
        load = LoadOptions(engine, **taken(LoadOptions, parameters))
        check_present(Path(engine))
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy starts threads otherwise, and nothing here uses them
        for warning in _warnings(load):
            click.echo(f"warning: {warning}", err=True)
        return function(load=load, **parameters)

    return click.argument("engine", metavar="ENGINE")(field_options(LoadOptions)(call))


def _warnings(load: LoadOptions) -> Iterator[str]:
    """What the options mean that their user may not want."""
    if load.acceptance is not None:
        yield "--spec-accept typical is lossy: outputs no longer have the model's distribution"
    if load.threads is not None and load.threads > (cores := usable_cores(load.core_set)):
        yield f"--threads {load.threads} is slower than {cores}, the number of cores that this process may use"
