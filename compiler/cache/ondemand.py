"""Finds the engine of a model that is run or served without an earlier compile: in the cache, or compiled into it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from ... import __version__
from ...runtime.errors import MissingExtraError, install
from ...runtime.format.present import is_engine
from ..errors import HubError, UsageError
from ..frontend.source import hub
from ..frontend.source.identify import knows
from ..frontend.source.shards import weight_files
from ..identity import engine_key, sources_digest, stated
from ..options import CompileOptions
from ..progress import Reporter
from ..request import check, check_found, find_model, lacking_module
from ..targets import find_target
from .store import Cell, Facts, open_cell

_HINT = f"{install('compile')}, or compile the engine elsewhere: an engine that exists runs without it"


@dataclass(frozen=True)
class CachedEngine:
    """An engine in the cache. It is not removed before this object is closed. compiled: whether it was compiled just
    now."""

    path: Path
    compiled: bool
    cell: Cell

    def __enter__(self) -> CachedEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cell.close()


def is_model(path: Path) -> bool:
    """Whether MODEL|ENGINE is a model, or a path about which the compiler gives a better error than the runtime."""
    if is_engine(path):
        return False
    return hub.is_hub_name(path) or path.is_file() or knows(path)


def engine_of(options: CompileOptions, reporter: Callable[[], Reporter]) -> CachedEngine:
    """The engine of `options.model`, a checkpoint directory or a hub name, compiled now if it is not in the cache.

    `options.output` is not used. If two processes want the same engine, one compiles and the other waits. reporter:
    makes the progress listener; called only if something is compiled. Raises the errors of a compile, and
    MissingExtraError if the compiler is not installed.
    """
    asked = options.model
    find_target(options.target)
    found = find_model(asked)
    check_found(found, options)
    lacking = lacking_module()
    options = replace(options, model=_local(asked, found.path, lacking))
    if not found.is_file:
        weight_files(options.model)
    cell = open_cell(engine_key(options))
    try:
        engine, compiled = cell.engine(), False
        if engine is None:
            with cell.compiling():  # another process may have compiled it by now
                engine = cell.engine()
                if engine is None:
                    engine, compiled = _compile(cell, options, str(asked), reporter, lacking), True
    except BaseException:
        cell.close()
        raise
    cell.touch()
    return CachedEngine(engine, compiled, cell)


def _local(asked: Path, path: Path, lacking: str) -> Path:
    """The directory with a model's files. Without a compiler nothing is downloaded."""
    if not hub.is_hub_name(asked):
        return path
    try:
        return hub.fetch(asked, cached=bool(lacking))
    except HubError as error:
        raise (_missing(str(asked), lacking) if lacking else error) from None


def _compile(cell: Cell, options: CompileOptions, asked: str, reporter: Callable[[], Reporter], lacking: str) -> Path:
    if lacking:
        raise _missing(asked, lacking)
    engine = cell.path / f"{_name(asked, options.model)}.engine"
    options = check(replace(options, output=engine, force=True)).options
    from ..driver import compile_engine

    with reporter() as telling:
        compile_engine(options, telling)
    default = stated(CompileOptions(options.model, options.output))
    given = {name: value for name, value in stated(options).items() if value != default[name]}
    cell.write(Facts(asked, str(options.model), engine.name, sources_digest(), __version__, given, time.time()))
    return engine


def _missing(asked: str, lacking: str) -> MissingExtraError:
    return MissingExtraError(
        f"{asked} is not compiled yet, and compiling needs {lacking}, which is not installed", _HINT
    )


def _name(asked: str, model: Path) -> str:
    """The name of an engine's directory, which the server reports as the model's name."""
    path = Path(asked)
    stem = re.sub(r"\.(gguf|onnx)$", "", model.resolve().name)
    name = path.name.partition("@")[0] if hub.is_hub_name(path) else stem
    if not name:
        raise UsageError(f"{asked!r} names no model", "give a checkpoint's directory or file, or ORG/NAME of the hub")
    return name
