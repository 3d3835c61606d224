"""How commands say which engine to load, and how: the argument ENGINE and the options of LoadOptions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from ..options import LoadOptions
from .fields import field_options, taken


def loads(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command that loads an engine: it has ENGINE and the options of LoadOptions, and gets them as `load`."""

    @functools.wraps(function)
    def call(engine: str, **parameters: Any) -> Any:
        load = LoadOptions(engine, **taken(LoadOptions, parameters))
        if load.acceptance is not None:
            click.echo(
                "warning: --spec-accept typical is lossy: outputs no longer have the model's distribution", err=True
            )
        return function(load=load, **parameters)

    return click.argument("engine", metavar="ENGINE")(field_options(LoadOptions)(call))
