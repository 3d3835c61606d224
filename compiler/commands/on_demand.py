"""`icc run|chat|serve MODEL`: the runtime's commands for a model, which is compiled into the cache if it is not
there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ...runtime.cli.commands import COMMANDS
from ...runtime.cli.fields import field_options, taken
from ...runtime.cli.group import Command
from ...runtime.format.load import read_targets
from ...runtime.format.present import is_engine
from ...runtime.settings import named_by_role, setting, settings
from .. import targets
from ..cache.ondemand import engine_of, is_model
from ..errors import UsageError
from ..heap import keep_freed_memory
from ..interrupt import ends_at_once
from ..options import CompileOptions
from ..progress import Reporter

_HELP = "A MODEL, which is a checkpoint directory or a name on the Hugging Face hub, is compiled first, once."


@dataclass(frozen=True)
class OnDemandOptions(CompileOptions):
    """Options of a compile; the default target is this machine."""

    target: str = setting(
        "native",
        "Target to compile a MODEL for, or to take from an engine of several targets.",
        values=targets.explained,
        open=True,
        metavar="TARGET",
        on_demand=True,
    )


def __getattr__(attribute: str) -> Command:
    """`run_command` and its like: the runtime's command `run`, which accepts MODEL in place of ENGINE."""
    name = attribute.removesuffix("_command")
    if name == attribute or name not in COMMANDS:
        raise AttributeError(attribute)
    return with_models(name, COMMANDS[name].load())


def with_models(name: str, runtime: click.Command) -> Command:
    """A runtime's command that also accepts a checkpoint directory or a hub name, and the options of a compile."""
    assert runtime.callback is not None
    run: Callable[..., Any] = runtime.callback
    offered = named_by_role(OnDemandOptions, "on_demand")
    left_out = [name for name in settings(OnDemandOptions) if name not in offered]

    def call(engine: str, **parameters: Any) -> Any:
        given = taken(OnDemandOptions, {name: parameters.pop(name) for name in offered})
        parameters["target"] = _target_of(Path(engine), given)
        with ExitStack() as stack:
            return run(engine=_engine(engine, given, stack), **parameters)

    options = field_options(OnDemandOptions, left_out)(lambda: None).__click_params__  # type: ignore[attr-defined]
    own = [param for param in runtime.params if param.name not in ("engine", "debug", "target")]
    argument = click.Argument(["engine"], metavar="ENGINE|MODEL")
    text = f"{cleandoc(runtime.help or '')}\n\n{_HELP}"
    return Command(name, params=[argument, *own, *reversed(options)], callback=call, help=text)


def _target_of(path: Path, given: dict[str, Any]) -> str | None:
    """The target that --target selects in an engine of several targets; None for other paths, or if it was not
    given."""
    if not is_engine(path) or read_targets(path) is None:
        return None
    target = given.pop("target")
    source = click.get_current_context().get_parameter_source("target")
    return None if source is ParameterSource.DEFAULT else target


def _engine(path: str, given: dict[str, Any], stack: ExitStack) -> str:
    """The engine directory that the command runs. For a MODEL, the one in the cache, kept there until `stack`
    closes."""
    if not is_model(Path(path)):
        if is_engine(Path(path)):
            _check_unused(path, given)
        return path
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch warns about its own internals
    with ends_at_once():
        options = CompileOptions(model=Path(path), output=Path(), **given)
        found = stack.enter_context(engine_of(options, _reporter))
    if found.compiled:
        click.echo(f"compiled {path}; it is kept in {found.path.parent} (icc cache list)", err=True)
    return str(found.path)


def _reporter() -> Reporter:
    keep_freed_memory()  # called only if something is compiled
    from ..console import ConsoleReporter  # imports torch, which an engine in the cache does not need

    return ConsoleReporter()


def _check_unused(path: str, given: dict[str, Any]) -> None:
    """UsageError if an option of a compile is given with an engine, which is compiled already."""
    default = OnDemandOptions(Path(), Path())
    for name, value in given.items():
        if value != getattr(default, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for a MODEL; {path} is an engine, compiled already", f"leave {option} out")
