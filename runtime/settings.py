"""Settings: fields of options dataclasses that describe their own command line option."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import msgspec

_KEY = "setting"


class Setting(msgspec.Struct, frozen=True):
    """The command line option of a field.

    help: one sentence. names: of the option, if they differ from the field's ("--kv-mib", "-o --output"). metavar: the
    placeholder for its value. unset: the meaning of None, for the help text. unit: by which the option's number is
    multiplied (1 << 20 for MiB). values: the possible values with their meanings; open: whether other values are
    possible. read: converts the text to the field's value; ValueError says what is wrong with the text. least: the
    smallest allowed number. needs: the property of an engine without which the option is hidden: "generate", "cpu",
    "gpu" or "targets" (see cli/own_engine.py).

    The roles of a compile's option: engine: whether the engine depends on it, so that it is part of the engine's key in
    the cache. calibration: whether the results of calibration depend on it; they do not without `engine`. plan,
    on_demand: whether `icc plan`, and `icc run|chat|serve MODEL`, have the option.
    """

    help: str
    names: str = ""
    metavar: str | None = None
    unset: str = ""
    unit: int | None = None
    values: Callable[[], Mapping[str, str]] | None = None
    open: bool = False
    read: Callable[[str], Any] | None = None
    needs: str = ""
    least: int | None = None
    engine: bool = True
    calibration: bool = True
    plan: bool = False
    on_demand: bool = False


def setting(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field with this default, which is an option of commands; `more`: further fields of Setting."""
    return field(default=default, metadata={_KEY: Setting(help, **more)})


def settings(options: type) -> dict[str, Setting]:
    """The settings of an options dataclass by field name, in order."""
    fields = options.__dataclass_fields__  # type: ignore[attr-defined]
    return {name: found.metadata[_KEY] for name, found in fields.items() if _KEY in found.metadata}


def named_by_role(options: type, role: str) -> tuple[str, ...]:
    """The fields of an options dataclass that have a role: "engine", "calibration", "plan" or "on_demand"."""
    return tuple(name for name, found in settings(options).items() if getattr(found, role))
