"""grammars.json: the schemas and grammars that an engine was compiled with, in lowered form."""

from __future__ import annotations

from typing import Literal

import msgspec

from .decoding import decode
from .files import EngineFiles
from .manifest import Manifest

FORMS_FILE = "grammars.json"  # an engine without forms does not have this file


class CompiledForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schema or grammar that answers may have to follow. source: the name of the file that it was read from. asked:
    the text of `grammars.sources` that a request for it yields; lowered: that text after
    `grammars.compiling.lowered`."""

    source: str
    kind: Literal["schema", "grammar"]
    asked: str
    lowered: str


class CompiledForms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All forms of an engine."""

    forms: list[CompiledForm]


def read_forms(files: EngineFiles, manifest: Manifest) -> list[CompiledForm]:
    """Read the forms of an engine; [] if it has none."""
    if FORMS_FILE not in manifest.files:
        return []
    return decode(files.read(FORMS_FILE), FORMS_FILE, CompiledForms).forms
