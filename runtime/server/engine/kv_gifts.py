"""KVGifts: KV that engine processes of this server write for other servers, while its prompts run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from .kv_file import KV_FOLDER, open_kv


@dataclass(eq=False)
class _NamedGift:
    """A prompt that runs. nbytes: so many of its file are there, in whole parts. changed: is set with the next
    change."""

    nbytes: int = 0
    ended: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class KVGifts:
    """The files of a folder by their names, those of prompts that run and those of prompts that have ended."""

    def __init__(self, folder: Path = KV_FOLDER) -> None:
        self.folder = folder
        self._gifts: dict[str, _NamedGift] = {}
        self._begun = asyncio.Event()  # is set with the next prompt that begins
        self._removed: dict[str, asyncio.Event] = {}  # of those that somebody waits for

    def begin(self, name: str) -> None:
        """A prompt was sent to an engine process, which will write its KV under a name."""
        self._gifts[name] = _NamedGift()
        self._begun.set()
        self._begun = asyncio.Event()

    def grow(self, name: str, nbytes: int) -> None:
        """Note that so many bytes are there by now."""
        if (gift := self._gifts.get(name)) is not None:
            gift.nbytes = nbytes
            gift.change()

    def end(self, name: str) -> None:
        """Nothing more comes: the prompt has ended, or has failed."""
        if (gift := self._gifts.pop(name, None)) is not None:
            gift.ended = True
            gift.change()

    async def wait(self, name: str, seconds: float) -> bool:
        """Whether a prompt of that name runs, or has run and left a file, at the latest after so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                while name not in self._gifts and not self._size(name):
                    await self._begun.wait()
        except TimeoutError:
            return False
        return True

    async def pieces(self, name: str) -> AsyncIterator[tuple[int, int]]:
        """Where the bytes begin and end that have come since the last piece, until no more come. Each piece is one or
        several whole parts, see KVWriter."""
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
        """It was taken, or nobody wants it."""
        if self._size(name):
            (self.folder / name).unlink(missing_ok=True)
        if (removed := self._removed.get(name)) is not None:
            removed.set()

    async def taken(self, name: str, seconds: float) -> None:
        """Wait until it is removed, at most so many seconds; one waits for each. A client may be quicker than this."""
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
        """Bytes of a file; 0 where there is none."""
        try:
            file = open_kv(self.folder, name)
        except (OSError, ValueError):
            return 0
        try:
            return os.fstat(file).st_size
        finally:
            os.close(file)
