"""KV blocks of a prompt as a file in shared memory, which is written in parts while the prompt runs.

A part is the size of its header (8 bytes, little-endian), the header (KVPart, MessagePack), and the bytes of its
blocks.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

PREFIX = "icc-kv-"
_NAME = re.compile(PREFIX + r"[0-9a-f]{32}")
# where every engine process of a user on this host looks
KV_FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
KEPT_S = 60.0  # that a file waits to be taken
_IOVECS = 512  # buffers of one system call; POSIX lets a system refuse more than 1,024


def new_kv_name() -> str:
    """A name for a file, which nobody can guess."""
    return f"{PREFIX}{secrets.token_hex(16)}"


def is_kv_name(name: str) -> bool:
    """Whether a KVWriter may have this name."""
    return _NAME.fullmatch(name) is not None


def open_kv(folder: Path, name: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a KVWriter's file. OSError where there is none, ValueError where it is no file of this user's, or
    its name is none that a KVWriter has."""
    if not is_kv_name(name):
        raise ValueError("it has no name that is given")
    file = os.open(folder / name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(file)
        raise ValueError("it is no file of this user's")
    return file


class KVPart(msgspec.Struct, array_like=True, frozen=True):
    """What a part holds. engine: a digest of what computed it. tokens: of the prompt, from `begin` on; numbers: of the
    blocks in each KV group that are kept of it up to there and were in no part before, in the order in which their
    bytes follow; nbytes: of all of those; sums: the CRC-32 of each, by group."""

    engine: bytes
    begin: int
    tokens: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]
    nbytes: int
    sums: tuple[tuple[int, ...], ...]

    @property
    def length(self) -> int:
        """Tokens of the prompt that are there with this part and those before it."""
        return self.begin + len(self.tokens)


def sum_of(views: Sequence[memoryview]) -> int:
    """The CRC-32 of a block whose bytes are in several places."""
    found = 0
    for view in views:
        found = zlib.crc32(view, found)
    return found


class KVWriter:
    """A new file of a folder, for this user alone. name: one of `new_kv_name`, "" for a new one. size: bytes of whole
    parts. OSError where it cannot be made, also where there is one of that name."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.name, self.size = name or new_kv_name(), 0
        self._path = folder / self.name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._stream: BinaryIO = open(os.open(self._path, flags, 0o600), "wb", buffering=1 << 20)

    def write(self, part: KVPart, blocks: Sequence[memoryview]) -> None:
        """Add a whole part, or nothing: OSError then."""
        header = msgspec.msgpack.encode(part)
        try:
            self._stream.write(len(header).to_bytes(8, "little") + header)
            for block in blocks:
                self._stream.write(block)
            self._stream.flush()
        except OSError:
            os.ftruncate(self._stream.fileno(), self.size)
            raise
        self.size = self._stream.tell()

    def close(self, remove: bool = False) -> None:
        """Nothing more comes; the file stays for whoever takes it, or is removed."""
        if remove:
            self._path.unlink(missing_ok=True)
        try:
            self._stream.close()
        except OSError:
            return  # what did not fit; the parts before it are there


class KVReader:
    """Reads the parts of a file in their order. Errors: those of `open_kv`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self._file = open_kv(folder, name)
        self._at = self._next = 0  # where the blocks of the part begin that was read last, and where the next part does

    def part(self) -> KVPart | None:
        """The next part, once it is there as a whole; None where it is not. `done` goes on to the one behind it."""
        size, room = int.from_bytes(os.pread(self._file, 8, self._next), "little"), os.fstat(self._file).st_size
        begin = self._next + 8
        if not size or begin + size > room:
            return None
        part = msgspec.msgpack.decode(os.pread(self._file, size, begin), type=KVPart)
        self._at = begin + size
        return part if part.nbytes >= 0 and self._at + part.nbytes <= room else None

    @property
    def ended(self) -> bool:
        """Whether nothing is left behind the parts that are done."""
        return self._next >= os.fstat(self._file).st_size

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill views with what begins at byte `offset` of the part's blocks. ValueError where that is not there."""
        at = self._at + offset
        for first in range(0, len(views), _IOVECS):
            some = views[first : first + _IOVECS]
            wanted = sum(map(len, some))
            if os.preadv(self._file, some, at) != wanted:
                raise ValueError("it is cut")
            at += wanted

    def done(self, part: KVPart) -> None:
        """The part needs not be read again."""
        self._next = self._at + part.nbytes

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)
