"""Reads the files of an adapter. They are not trusted: a path may name a pipe or device, or a file larger than the
memory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import AdapterError
from ..executor.cpu.memory import available_bytes

_SHARE = 4  # an adapter takes at most this many times its file: the bytes, 16-bit values as float32, and packed slots
_LEAST = 64 << 20


def read_file(path: Path, most: int | None = None) -> bytes:
    """All bytes of a regular file, or of a link to one (caches of model hubs hold links).

    AdapterError if the path is no regular file (a pipe would block, a device may have no end), if it has more than
    `most` bytes (None: more than the free memory can take), or if it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise AdapterError(f"{path} is no file")
            limit = max(available_bytes() // _SHARE, _LEAST) if most is None else most
            if facts.st_size > limit:
                free = " that there is memory for" if most is None else ""
                raise AdapterError(f"{path} has {facts.st_size} bytes, more than the {limit}{free}")
            return file.read(facts.st_size)
    except OSError as error:
        raise AdapterError(f"cannot read {path}: {error.strerror}") from None
