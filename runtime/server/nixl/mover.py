"""Mover: moves bytes of files in shared memory between processes, also of different hosts, through NIXL."""

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

HEAD = 8  # bytes at the beginning of a piece that are written last
_LATEST_S = 120.0  # the longest time for one piece
_MEMORY, _BACKENDS = "DRAM", ["UCX"]


class _MemoryRegion:
    """Bytes of a file, or anonymous memory if `file` is negative, mapped and registered with an agent. OSError if they
    cannot be mapped."""

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
        """Deregister and unmap the memory."""
        self._agent.deregister_memory(self.registered)
        self._unmap()

    def _unmap(self) -> None:
        del self._bytes
        self._map.close()


@dataclass(eq=False)
class _Transfer:
    """A running transfer of a piece."""

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
        self._peers: dict[str, set[bytes]] = {}  # the agents that were read from, by key

    @property
    def busy(self) -> bool:
        """Whether transfers are running."""
        return bool(self._transfers)

    def publish(self, asked: Publish) -> Published | Failure:
        """Allow other agents to read a piece of a file; the metadata gives access to no other memory of this
        process."""
        try:
            path = Path(asked.path)
            file = open_kv(path.parent, path.name, os.O_RDWR)  # network cards cannot register read-only memory
            try:
                region = _MemoryRegion(self._agent, file, asked.begin, asked.end)
            finally:
                os.close(file)
            self._published.setdefault(asked.key, []).append(region)
            agent = self._agent.get_partial_agent_metadata(region.registered, True, _BACKENDS)
        except Exception as error:  # NIXL's errors have no common class
            return Failure(asked.id, _words(error))
        return Published(asked.id, agent, region.address)

    def forget(self, key: str) -> None:
        """See Forget."""
        for region in self._published.pop(key, ()):
            region.close()
        left = self._peers.pop(key, set()).difference(*self._peers.values())
        for peer in left:
            # its addresses may soon hold other regions, for which the old metadata must not be used
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(peer)

    def fetch(self, asked: FetchBytes) -> Failure | None:
        """Start to read memory that another process has published. None if it has started: `finished` then gives the
        result; else the Failure."""
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
        """The results of transfers that have ended since the last call."""
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
            return  # NIXL may still write to the memory: keep it mapped
        for region in (transfer.target, transfer.head):
            with contextlib.suppress(Exception):
                region.close()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
