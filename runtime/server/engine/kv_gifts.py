"""KVGifts: the KV files that engine processes of this server write for other servers while prompts run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from .kv_file import KV_FOLDER, open_kv


@dataclass(eq=False)
class _NamedGift:
    """The KV file of a running prompt. nbytes: size of its complete parts. changed: set at the next change."""

    nbytes: int = 0
    ended: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class KVGifts:
    """The KV files of a folder by name, of running prompts and of prompts that have ended."""

    def __init__(self, folder: Path = KV_FOLDER) -> None:
        self.folder = folder
        self._gifts: dict[str, _NamedGift] = {}
        self._begun = asyncio.Event()  # set when the next prompt begins
        self._removed: dict[str, asyncio.Event] = {}  # of files that `taken` waits for

    def begin(self, name: str) -> None:
        """Register a prompt that was sent to an engine process, which will write its KV under a name."""
        self._gifts[name] = _NamedGift()
        self._begun.set()
        self._begun = asyncio.Event()

    def grow(self, name: str, nbytes: int) -> None:
        """Set the size of a file's complete parts."""
        if (gift := self._gifts.get(name)) is not None:
            gift.nbytes = nbytes
            gift.change()

    def end(self, name: str) -> None:
        """Mark a file as complete: the prompt has ended, or has failed."""
        if (gift := self._gifts.pop(name, None)) is not None:
            gift.ended = True
            gift.change()

    async def wait(self, name: str, seconds: float) -> bool:
        """Wait up to `seconds` until a prompt of that name runs, or has left a file; returns whether there is one."""
        try:
            async with asyncio.timeout(seconds):
                while name not in self._gifts and not self._size(name):
                    await self._begun.wait()
        except TimeoutError:
            return False
        return True

    async def pieces(self, name: str) -> AsyncIterator[tuple[int, int]]:
        """(begin, end) offsets of new bytes as they are written, until the file is complete. Each piece is one or
        several complete parts, see KVWriter."""
        gift, at = self._gifts.get(name), 0
        if gift is None:
            gift = _NamedGift(self._size(name), ended=True)
        while True:
            changed, end = gift.changed, gift.nbytes
            if end > at:
                yield at, end
                at = end
            elif gift.ended:
                return
            else:
                await changed.wait()

    def remove(self, name: str) -> None:
        """Remove a file, which was taken or is no longer wanted."""
        if self._size(name):
            (self.folder / name).unlink(missing_ok=True)
        if (removed := self._removed.get(name)) is not None:
            removed.set()

    async def taken(self, name: str, seconds: float) -> None:
        """Wait up to `seconds` until a file is removed, which may have happened already. Only one caller may wait for a
        file."""
        if not self._size(name):
            return
        removed = self._removed[name] = asyncio.Event()
        try:
            async with asyncio.timeout(seconds):
                await removed.wait()
        except TimeoutError:
            return
        finally:
            self._removed.pop(name, None)

    def _size(self, name: str) -> int:
        """Bytes of a file; 0 if it does not exist."""
        try:
            file = open_kv(self.folder, name)
        except (OSError, ValueError):
            return 0
        try:
            return os.fstat(file).st_size
        finally:
            os.close(file)
