"""grammars.json: the schemas and grammars that an engine was compiled with, lowered."""

from __future__ import annotations

from typing import Literal

import msgspec

from .decoding import decode
from .files import EngineFiles
from .manifest import Manifest

FORMS_FILE = "grammars.json"  # an engine without one has none


class CompiledForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What answers may have to follow. source: the name of the file that it was read from. asked: what requests that
    ask for it become, a text of `grammars.sources`; lowered: the same as `grammars.compiling.lowered` gives it."""

    source: str
    kind: Literal["schema", "grammar"]
    asked: str
    lowered: str


class CompiledForms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of an engine."""

    forms: list[CompiledForm]


def read_forms(files: EngineFiles, manifest: Manifest) -> list[CompiledForm]:
    """The forms of an engine; [] of one without."""
    if FORMS_FILE not in manifest.files:
        return []
    return decode(files.read(FORMS_FILE), FORMS_FILE, CompiledForms).forms
