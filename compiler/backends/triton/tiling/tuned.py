"""Tuning files: the tilings that were fastest on a device, read by later compiles for the same target.

`icc tune` writes them; `tuned/<target>.json` beside this file holds those that come with icc, and ICC_TUNING names a
user's file, which takes precedence.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ....errors import UsageError
from ....targets import Target
from .choice import Config


class TuningFile(msgspec.Struct, forbid_unknown_fields=True):
    """Tilings by key for one target, with where and when they were measured."""

    target: str
    device: str
    date: str
    triton: str
    tilings: dict[str, Config]


def shipped(target: Target) -> Path:
    """The tuning file of a target that comes with icc."""
    return Path(__file__).with_name("tuned") / f"{target.name}.json"


def load_tuned(target: Target) -> dict[str, Config]:
    """All known tilings of a target; UsageError for a file that cannot be read or is for another target."""
    files = [shipped(target)] if shipped(target).is_file() else []
    own = os.environ.get("ICC_TUNING")
    tilings: dict[str, Config] = {}
    for file in [*files, *([Path(own)] if own else [])]:
        tilings |= read_tuning(file, target).tilings
    return tilings


def read_tuning(file: Path, target: Target) -> TuningFile:
    """One tuning file. UsageError if it cannot be read, or is for another target."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=TuningFile)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(
            f"tuning file {file}: {error}", "write it again with `icc tune`, or unset ICC_TUNING"
        ) from None
    if found.target != target.name:
        raise UsageError(f"tuning file {file} is for target {found.target!r}, not {target.name!r}", "unset ICC_TUNING")
    return found
