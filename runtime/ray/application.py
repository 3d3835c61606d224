"""`build`: the application for a Serve config file, whose import_path is `icc.runtime.ray.application:build`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from ..errors import UsageError
from ..options import LoadOptions
from ..server.options import ServeOptions
from .app import deployment
from .options import RayOptions, autoscale

if TYPE_CHECKING:
    from ray.serve import Application  # pyright: ignore

_RAY = {"autoscale": "scale", "cpus": "cpus", "resources": "resources"}  # of RayOptions


def build(args: dict[str, Any]) -> Application:
    """The application for these arguments: `engine`, `autoscale` ("1-4"), `cpus`, `resources`, and fields of
    ServeOptions and LoadOptions by their names. UsageError for any other name; otherwise as `deployment`."""
    serve, ray = read_args(args)
    return deployment(serve, options=ray)


def read_args(args: dict[str, Any]) -> tuple[ServeOptions, RayOptions]:
    """The options from the arguments of a config file. UsageError names a missing or unknown argument."""
    given = dict(args)
    if "engine" not in given:
        raise UsageError("args: no engine", "give its directory, engine: /engine")
    load_names = LoadOptions.__dataclass_fields__.keys() - {"path"}
    load = {"path": given.pop("engine"), **{name: given.pop(name) for name in load_names & given.keys()}}
    ray = {field: given.pop(name) for name, field in _RAY.items() if name in given}
    try:
        ray |= {"scale": autoscale(str(ray["scale"]))} if "scale" in ray else {}
    except ValueError as error:
        raise UsageError(f"args: autoscale: {error}") from error
    hints = get_type_hints(ServeOptions)
    wrong = sorted(given.keys() - (hints.keys() - {"load", "command"}))
    if wrong:
        raise UsageError(f"args: {wrong[0]!r} is no option", f"there are engine, autoscale, cpus, {', '.join(hints)}")
    paths = {name for name in given if Path in getattr(hints[name], "__args__", ())}
    found: dict[str, Any] = {name: Path(value) if name in paths else value for name, value in given.items()}
    found |= {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
    return ServeOptions(LoadOptions(**load), **found), RayOptions(**ray)
