"""Opens a GGUF model that consists of one or several files."""

from __future__ import annotations

import re
from pathlib import Path

from .....runtime.format.gguf import GgufContainer, join, read_container
from ....errors import CheckpointError

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 4096


def open_container(path: Path) -> GgufContainer:
    """The model whose only file, or any part, is `path`. CheckpointError if a part is missing or wrong."""
    here = read_container(path)
    count = here.get("split.count", int, 1)
    if count <= 1:
        return here
    named = _PART.fullmatch(path.name)
    if named is None or int(named[3]) != count or count > _MAX_PARTS:
        raise CheckpointError(
            f"{path} is part of a model in {count} files, and is not named so",
            "name them NAME-00001-of-000NN.gguf, as they were",
        )
    parts: list[GgufContainer] = []
    for number in range(1, count + 1):
        part = path.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf")
        if not part.is_file():
            raise CheckpointError(f"{path} is part of a model, and {part.name} is missing", "put it beside the others")
        found = read_container(part)
        if (found.get("split.count", int), found.get("split.no", int)) != (count, number - 1):
            raise CheckpointError(f"{part} is not file {number} of {count} of this model")
        parts.append(found)
    return join(parts)
