"""The files of an adapter as bytes. They come from others: they may be no files, or larger than what memory is left."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import AdapterError
from ..executor.cpu.memory import available_bytes

_SHARE = 4  # an adapter takes this times its file at most: the bytes, float32 of 16 bits, and what pools hold
_LEAST = 64 << 20


def read_file(path: Path, most: int | None = None) -> bytes:
    """All of a regular file, which may be a link to one: hubs keep files so.

    AdapterError where it is no such file (a pipe would block, a device may have no end), has more than `most` bytes
    (None: than fit beside all else in memory), or cannot be read.
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
