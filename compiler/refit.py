"""Puts new weights into an existing engine, whose program and kernels do not change: in its place, or as a delta."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .engine.earlier import EarlierEngine, open_earlier
from .engine.output import check_output
from .errors import UsageError
from .options import CompileOptions
from .recorded import GIVEN, flag, options_again, recorded


def check_refit(
    engine: Path, checkpoint: Path, output: Path | None, force: bool, given: Mapping[str, Any]
) -> tuple[EarlierEngine, CompileOptions]:
    """The engine, opened and verified, and the options to compile `checkpoint` in the same way, to `output` or, if it
    is None, in the engine's place. given: files that those options name, see `options_again`. Raises the errors of
    `options_again` and `open_engine`."""
    if output is not None:
        check_output(output, force)
    earlier = open_earlier(engine)
    return earlier, options_again(earlier.engine, checkpoint, output or engine, given)


def as_delta(options: CompileOptions) -> tuple[EarlierEngine, CompileOptions]:
    """The engine of --like, opened and verified, and the options that it was compiled with for this model. UsageError
    if `options` contradict them; also raises the errors of `options_again` and `open_engine`."""
    assert options.like is not None
    base, output = options.like.resolve(), options.output.resolve()
    if output == base or output in base.parents:  # the latter if the base is one target of several
        raise UsageError(f"-o {options.output} is the engine of --like, which the delta needs", "another path with -o")
    asked = recorded(options)
    earlier = open_earlier(options.like, as_base=True)
    given = {name: getattr(options, name) for name in GIVEN if name in asked}
    again = options_again(earlier.engine, options.model, options.output, given)
    had = recorded(again)
    for name, value in asked.items():
        if name not in GIVEN and value != had.get(name):
            own = f"with {had[name]}" if name in had else "without it"
            raise UsageError(f"{flag(name)} {value}: {options.like} was compiled {own}", f"leave {flag(name)} out")
    own = {name: getattr(options, name) for name in ("force", "dump_passes", "prefix", "schema", "grammar")}
    return earlier, replace(again, **own)
