"""Settings: fields of options dataclasses that say themselves how a command line shows and reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import msgspec

_KEY = "setting"


class Setting(msgspec.Struct, frozen=True):
    """A field as an option of the command line.

    help: one sentence. names: of the option, where they are not the field's ("--kv-mib", "-o --output"). metavar: what
    stands for its value. unset: what None means, as help says it. unit: what one of the option's numbers is in the
    field (1 << 20 for MiB). values: what it may be, each with its meaning; open: other values are possible.
    read: makes the field's value of the text; ValueError says what is wrong with it. least: the smallest number that is
    allowed. needs: what an engine must have for the option to be there: "generate", "cpu", "gpu" or "targets" (see
    cli/own_engine.py).

    The roles of a compile's option: engine: whether what the engine is depends on it, so that it is part of its key in
    the cache. calibration: whether what calibration finds depends on it; without `engine` it does not. plan, on_demand:
    whether `icc plan`, and `icc run|chat|serve MODEL`, have the option.
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
    """A field of a dataclass with this default that commands have as an option; `more` are the fields of Setting."""
    return field(default=default, metadata={_KEY: Setting(help, **more)})


def settings(options: type) -> dict[str, Setting]:
    """The settings of an options dataclass by the names of their fields, in their order."""
    fields = options.__dataclass_fields__  # type: ignore[attr-defined]
    return {name: found.metadata[_KEY] for name, found in fields.items() if _KEY in found.metadata}


def named_by_role(options: type, role: str) -> tuple[str, ...]:
    """The fields of an options dataclass that have a role: "engine", "calibration", "plan" or "on_demand"."""
    return tuple(name for name, found in settings(options).items() if getattr(found, role))
