"""KV blocks of a prompt as a file in shared memory, which is written in parts while the prompt runs.

A part consists of the size of its header (8 bytes, little-endian), the header (KVPart, MessagePack), and the bytes of
its blocks.
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
# shared by all engine processes of a user on this host
KV_FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
KEPT_S = 60.0  # how long a file waits to be taken
_IOVECS = 512  # buffers of one system call; POSIX lets a system refuse more than 1,024


def new_kv_name() -> str:
    """A new file name, which cannot be guessed."""
    return f"{PREFIX}{secrets.token_hex(16)}"


def is_kv_name(name: str) -> bool:
    """Whether the name has the form of `new_kv_name`."""
    return _NAME.fullmatch(name) is not None


def open_kv(folder: Path, name: str, flags: int = os.O_RDONLY) -> int:
    """Open a KVWriter's file; returns the descriptor. OSError if there is none, ValueError if it is not a regular file
    of this user, or not a name of a KVWriter."""
    if not is_kv_name(name):
        raise ValueError("its name is not one of this server's KV files")
    file = os.open(folder / name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(file)
        raise ValueError("it is not a regular file of this user")
    return file


class KVPart(msgspec.Struct, array_like=True, frozen=True):
    """The header of a part. engine: a digest of the engine that computed it. tokens: ids of the prompt from position
    `begin` on; numbers: by KV group, the blocks of the prompt up to here that no earlier part had, in the order of
    their bytes; nbytes: of all these blocks; sums: the CRC-32 of each block, by group."""

    engine: bytes
    begin: int
    tokens: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]
    nbytes: int
    sums: tuple[tuple[int, ...], ...]

    @property
    def length(self) -> int:
        """Tokens of the prompt in this part and all earlier ones."""
        return self.begin + len(self.tokens)


def sum_of(views: Sequence[memoryview]) -> int:
    """The CRC-32 of a block whose bytes are in several places."""
    found = 0
    for view in views:
        found = zlib.crc32(view, found)
    return found


class KVWriter:
    """Writes a new file that only this user can read. name: one of `new_kv_name`, "" for a new one. size: bytes of the
    complete parts. OSError if the file cannot be made, or exists."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.name, self.size = name or new_kv_name(), 0
        self._path = folder / self.name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._stream: BinaryIO = open(os.open(self._path, flags, 0o600), "wb", buffering=1 << 20)

    def write(self, part: KVPart, blocks: Sequence[memoryview]) -> None:
        """Append a part; on OSError the file is unchanged."""
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
        """Close the file, which stays for the reader unless `remove`."""
        if remove:
            self._path.unlink(missing_ok=True)
        try:
            self._stream.close()
        except OSError:
            return  # the last bytes did not fit; earlier parts are complete


class KVReader:
    """Reads the parts of a file in order. Raises as `open_kv`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self._file = open_kv(folder, name)
        self._at = self._next = 0  # offsets of the last read part's blocks, and of the next part

    def part(self) -> KVPart | None:
        """The header of the next part; None until the part is complete. `done` advances to the one after it."""
        size, room = int.from_bytes(os.pread(self._file, 8, self._next), "little"), os.fstat(self._file).st_size
        begin = self._next + 8
        if not size or begin + size > room:
            return None
        part = msgspec.msgpack.decode(os.pread(self._file, size, begin), type=KVPart)
        self._at = begin + size
        return part if part.nbytes >= 0 and self._at + part.nbytes <= room else None

    @property
    def ended(self) -> bool:
        """Whether the file ends after the parts that are done."""
        return self._next >= os.fstat(self._file).st_size

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill the views with bytes of the part's blocks, from byte `offset` on. ValueError if the file is too
        short."""
        at = self._at + offset
        for first in range(0, len(views), _IOVECS):
            some = views[first : first + _IOVECS]
            wanted = sum(map(len, some))
            if os.preadv(self._file, some, at) != wanted:
                raise ValueError("it is cut")
            at += wanted

    def done(self, part: KVPart) -> None:
        """Advance to the part after this one."""
        self._next = self._at + part.nbytes

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
