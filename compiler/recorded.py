"""The options of a compile as its engine records them, and their reuse for another compile.

report.json has the options that differ from their defaults. A file or directory is recorded by its content, not by its
path, so that equal compiles give equal engines; a later compile must be given it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..runtime.format.load import Engine
from .errors import UsageError
from .identity import FOLDERS, stated
from .options import CompileOptions

REPORT_FILE = "report.json"
GIVEN = ("calib", "gate_text", "lora", "spec")  # options that may name a file


def recorded(options: CompileOptions) -> dict[str, Any]:
    """The options that decide an engine's content and differ from their defaults, as plain values by name."""
    return {
        name: value
        for name, value in stated(options).items()
        if getattr(options, name) != CompileOptions.__dataclass_fields__[name].default
    }


def recorded_in(engine: Engine) -> dict[str, Any] | None:
    """The result of `recorded` in an engine's report; None if the report does not have it."""
    if REPORT_FILE not in engine.manifest.files:
        return None
    return json.loads(engine.files.read(REPORT_FILE)).get("options")


def options_again(engine: Engine, model: Path, output: Path, given: Mapping[str, Any]) -> CompileOptions:
    """The options that an engine was compiled with, for another model and output. given: files that they name, by the
    names of GIVEN. UsageError for a file that is missing or that the engine has not used, or if no options are
    recorded."""
    if (facts := recorded_in(engine)) is None:
        raise _unknown(engine)
    for name in GIVEN:
        value, had = given.get(name), facts.get(name)
        names_file = name != "spec" or str(had).startswith(FOLDERS)
        if had is not None and names_file and value is None:
            form = f"{str(had).partition(':')[0]}:DIR" if name == "spec" else "FILE" if name != "lora" else "DIR"
            raise UsageError(f"{engine.path} was compiled with {flag(name)}", f"give it again: {flag(name)} {form}")
        if value is not None and (had is None or not names_file):
            raise UsageError(f"{flag(name)}: {engine.path} was compiled without", "leave it out")
    own: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
    own |= {name: value for name, value in given.items() if value is not None}
    return CompileOptions(model=model, output=output, force=True, **own)


def flag(name: str) -> str:
    """The name of an option on the command line."""
    return "--" + name.replace("_", "-")


def _unknown(engine: Engine) -> UsageError:
    return UsageError(
        f"{engine.path} does not say how it was compiled: icc {engine.manifest.icc_version} wrote it",
        "compile the checkpoint by itself",
    )
