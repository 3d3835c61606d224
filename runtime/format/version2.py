"""Format version 2, as version 3 has it: an engine had one program, and two sections of it had names that stood for
what they were given and gave."""

from __future__ import annotations

import msgspec

_MISSING = msgspec.Raw(b"null")  # is refused where the field must be


def manifest_as_3(facts: dict[str, msgspec.Raw]) -> bytes:
    """engine.json, by its fields, with the engine's program under its name."""
    entry = {
        "program": facts.pop("program_file", _MISSING),
        "weights": facts.pop("weights_file", _MISSING),
        "libraries": facts.pop("libraries", _MISSING),
    }
    return msgspec.json.encode({**facts, "programs": {"main": entry}})
