"""Mover: bytes of files in shared memory go from one process to another by NIXL, on whatever host that is."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engine.kv_file import open_kv
from .library import Agent
from .messages import Failure, FetchBytes, Fetched, Publish, Published

HEAD = 8  # bytes at the beginning of a piece that come at last
_LATEST_S = 120.0  # that one piece may take
_MEMORY, _BACKENDS = "DRAM", ["UCX"]


class _MemoryRegion:
    """Bytes of a file, or of no file, as memory that an agent knows. OSError where they cannot be mapped."""

    def __init__(self, agent: Agent, file: int, begin: int, end: int) -> None:
        first = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        self._map = mmap.mmap(file, end - first) if file < 0 else mmap.mmap(file, end - first, offset=first)
        self._bytes = (ctypes.c_char * len(self._map)).from_buffer(self._map)
        self.address = ctypes.addressof(self._bytes) + begin - first
        self._agent, self.size = agent, end - begin
        try:
            self.registered = agent.register_memory([(self.address, self.size, 0, "")], _MEMORY)
        except BaseException:
            self._unmap()
            raise

    def close(self) -> None:
        """The agent forgets it."""
        self._agent.deregister_memory(self.registered)
        self._unmap()

    def _unmap(self) -> None:
        del self._bytes
        self._map.close()


@dataclass(eq=False)
class _Transfer:
    """A piece on its way."""

    asked: FetchBytes
    peer: bytes
    target: _MemoryRegion
    head: _MemoryRegion
    file: int
    handle: Any = None
    begun: float = field(default_factory=time.monotonic)


class Mover:
    """Publishes and fetches through an agent. clock: in seconds."""

    def __init__(self, agent: Agent, clock: Callable[[], float] = time.monotonic) -> None:
        self._agent, self._clock = agent, clock
        self._published: dict[str, list[_MemoryRegion]] = {}
        self._transfers: list[_Transfer] = []
        self._peers: dict[str, set[bytes]] = {}  # who is read from, by key

    @property
    def busy(self) -> bool:
        """Whether pieces are on their way."""
        return bool(self._transfers)

    def publish(self, asked: Publish) -> Published | Failure:
        """Let others read a piece of a file, and nothing else of this process's memory by the same metadata."""
        try:
            path = Path(asked.path)
            file = open_kv(path.parent, path.name, os.O_RDWR)  # network cards register no memory that is read-only
            try:
                region = _MemoryRegion(self._agent, file, asked.begin, asked.end)
            finally:
                os.close(file)
            self._published.setdefault(asked.key, []).append(region)
            agent = self._agent.get_partial_agent_metadata(region.registered, True, _BACKENDS)
        except Exception as error:  # NIXL's have no class of their own
            return Failure(asked.id, _words(error))
        return Published(asked.id, agent, region.address)

    def forget(self, key: str) -> None:
        """See Forget."""
        for region in self._published.pop(key, ()):
            region.close()
        left = self._peers.pop(key, set()).difference(*self._peers.values())
        for peer in left:
            # where its regions were there may be others soon: what is known of them must not be taken for that
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(peer)

    def fetch(self, asked: FetchBytes) -> Failure | None:
        """Begin to read what another process has published: None, and `finished` says how it went; or why it cannot."""
        transfer = None
        try:
            peer = self._agent.add_remote_agent(asked.agent)
            self._peers.setdefault(asked.key, set()).add(peer)
            transfer = self._opened(asked, peer)
            head, rest = min(HEAD, asked.end - asked.begin), max(asked.end - asked.begin - HEAD, 0)
            here = [(transfer.head.address, head, 0), (transfer.target.address + head, rest, 0)]
            there = [(asked.address, head, 0), (asked.address + head, rest, 0)]
            local, remote = (
                self._agent.get_xfer_descs([one for one in some if one[1]], _MEMORY) for some in (here, there)
            )
            transfer.handle = self._agent.initialize_xfer("READ", local, remote, peer)
            self._transfers.append(transfer)
            if self._agent.transfer(transfer.handle) == "ERR":
                raise ValueError("it cannot be begun")
        except Exception as error:
            if transfer is not None:
                self._end(transfer)
            return Failure(asked.id, _words(error))
        return None

    def _opened(self, asked: FetchBytes, peer: bytes) -> _Transfer:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        file = os.open(asked.path, flags, 0o600)
        regions: list[_MemoryRegion] = []
        try:
            os.posix_fallocate(file, asked.begin, asked.end - asked.begin)  # or a full disk would end the process
            regions.append(_MemoryRegion(self._agent, file, asked.begin, asked.end))
            regions.append(_MemoryRegion(self._agent, -1, 0, HEAD))
        except BaseException:
            for region in regions:
                region.close()
            os.close(file)
            raise
        target, head = regions
        return _Transfer(asked, peer, target, head, file, begun=self._clock())

    def finished(self) -> list[Fetched | Failure]:
        """The pieces that have come since the last call, and those that will not."""
        found: list[Fetched | Failure] = []
        for transfer in list(self._transfers):
            try:
                state = self._agent.check_xfer_state(transfer.handle)
                if state == "PROC" and self._clock() - transfer.begun < _LATEST_S:
                    continue
                if state != "DONE":
                    raise TimeoutError("it takes too long") if state == "PROC" else ValueError("it was not sent")
                size = min(HEAD, transfer.asked.end - transfer.asked.begin)
                os.pwrite(transfer.file, ctypes.string_at(transfer.head.address, size), transfer.asked.begin)
            except Exception as error:
                self._end(transfer)
                found.append(Failure(transfer.asked.id, _words(error)))
            else:
                self._end(transfer)
                found.append(Fetched(transfer.asked.id))
        return found

    def _end(self, transfer: _Transfer) -> None:
        if transfer in self._transfers:
            self._transfers.remove(transfer)
        os.close(transfer.file)
        try:
            if transfer.handle is not None:
                self._agent.release_xfer_handle(transfer.handle)
        except Exception:
            return  # it may still be written to: the memory stays as it is
        for region in (transfer.target, transfer.head):
            with contextlib.suppress(Exception):
                region.close()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
