"""Options of the command line from the fields of an options dataclass; see settings.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import click

from ..settings import Setting, settings
from .group import EngineOption

PATH = click.Path(path_type=Path)
_KINDS: dict[Any, click.ParamType] = {int: click.INT, float: click.FLOAT, str: click.STRING, Path: PATH}


class Read(click.ParamType):
    """A click type: `read` parses the text, and the message of its ValueError is the refusal."""

    name = "text"

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def field_options(options: type, leave_out: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a command an option for every setting of `options`, in their order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(options)
        found = [(name, s) for name, s in settings(options).items() if name not in leave_out]
        for name, given in reversed(found):
            default = options.__dataclass_fields__[name].default  # type: ignore[attr-defined]
            _add(function, _option(name, given, hints[name], default))
        return function

    return decorate


def taken(options: type, parameters: dict[str, Any]) -> dict[str, Any]:
    """The fields of `options` from a command's parameters, from which they are removed."""
    return {name: parameters.pop(name) for name in settings(options) if name in parameters}


def _add(function: Callable[..., Any], option: click.Option) -> None:
    """As click.option does, for an option object that exists already."""
    if not hasattr(function, "__click_params__"):
        function.__click_params__ = []  # type: ignore[attr-defined]
    function.__click_params__.append(option)  # type: ignore[attr-defined]


def _option(name: str, given: Setting, hint: Any, default: Any) -> EngineOption:
    words = given.names.split() or [f"--{name.replace('_', '-')}"]
    more: dict[str, Any] = {"help": given.help, "needs": given.needs, "metavar": given.metavar, "default": default}
    if given.unset:
        more["show_default"] = given.unset
    if hint is bool:
        if default:
            words = [f"{words[0]}/--no-{words[0][2:]}"]
        return EngineOption([*words, name], is_flag=True, **more)
    if get_origin(hint) is tuple and given.read is None:
        return EngineOption([*words, name], type=_kind(get_args(hint)[0], given), multiple=True, **more)
    more["explained"] = given.values
    if given.unit is not None:
        more["callback"] = lambda ctx, param, value: _scaled(param, value, given.unit or 1)
    return EngineOption([*words, name], type=_kind(hint, given), **more)


def _kind(hint: Any, given: Setting) -> click.ParamType:
    if given.read is not None:
        return Read(given.read)
    if given.values is not None and not given.open:
        return click.Choice(list(given.values()))
    members = [member for member in get_args(hint) or (hint,) if member is not NoneType]
    if given.unit is not None:
        return click.FLOAT
    return next((_KINDS[member] for member in members if member in _KINDS), click.STRING)


def _scaled(param: click.Parameter, value: float | None, unit: int) -> int | None:
    if value is None:
        return None
    if not 0 <= value < 2**63 / unit:
        raise click.BadParameter(f"{value:g} is not 0 or more", param=param)
    return int(value * unit)
