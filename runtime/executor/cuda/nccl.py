"""NCCL, and AMD's RCCL, through their common C API (NCCL user guide, "API"): collectives over all ranks.

The library comes with the package nvidia-nccl-cu12 or -cu13, with the system, or with ROCm. NCCL connects the processes
through its own sockets, which are kept to the loopback interface unless NCCL_SOCKET_IFNAME says otherwise.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_void_p
from pathlib import Path
from threading import Thread
from typing import Any

from ...errors import DeviceError

_FLOAT32, _SUM = 7, 0  # ncclDataType_t, ncclRedOp_t
_ID_BYTES = 128
_FILES = {"cuda": ("libnccl.so.2", "libnccl.so"), "hip": ("librccl.so.1", "librccl.so")}
START_S = 120.0


class _UniqueId(ctypes.Structure):
    _fields_ = (("content", c_ubyte * _ID_BYTES),)


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetUniqueId": (POINTER(_UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, _UniqueId, c_int),
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclAllGather": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    "ncclReduceScatter": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclCommAbort": (c_void_p,),
    "ncclCommDestroy": (c_void_p,),
}


# by op of Exchanged (walk.py): the function, and its arguments between the type and the communicator
_EXCHANGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "all_reduce": ("ncclAllReduce", ("op",)), "all_gather": ("ncclAllGather", ()),
    "reduce_scatter": ("ncclReduceScatter", ("op",)), "reduce": ("ncclReduce", ("op", "root")),
    "broadcast": ("ncclBroadcast", ("root",)),
}  # fmt: skip


class Nccl:
    """The NCCL library; a failure raises DeviceError, which names the function."""

    def __init__(self, library: Any) -> None:
        """library: the loaded libnccl or librccl."""
        self._library = library
        for name, kinds in _SIGNATURES.items():
            getattr(library, name).argtypes = kinds
        library.ncclGetErrorString.restype = c_char_p

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the library. DeviceError if it fails."""
        if status := getattr(self._library, name)(*args):
            said = self._library.ncclGetErrorString(status)
            raise DeviceError(f"{name} failed: {said.decode()}", "NCCL_DEBUG=WARN in the environment says more")

    def unique_id(self) -> bytes:
        """A new id for a communicator: rank 0 makes it and passes it to all ranks."""
        found = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(found))
        return bytes(found.content)


def find_nccl(backend: str) -> Nccl | None:
    """The library of this machine for "cuda" or "hip"; None if there is none."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    for place in (*_of_package(), *_FILES[backend]) if backend == "cuda" else _FILES[backend]:
        try:
            return Nccl(ctypes.CDLL(place))
        except OSError:
            continue
    return None


def _of_package() -> list[str]:
    """The path of the library in the package nvidia-nccl-cu12 or -cu13, if it is installed."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    folders = found.submodule_search_locations if found else None
    return [str(Path(folder) / "lib" / "libnccl.so.2") for folder in folders or ()]


class Communicator:
    """One rank's part of an NCCL communicator. Its calls are put on a stream and can be captured in graphs."""

    def __init__(self, nccl: Nccl, unique_id: bytes, rank: int, count: int) -> None:
        """Wait until all ranks have joined. The current device of this thread becomes this rank's."""
        self._nccl, self._comm, self._last = nccl, c_void_p(), count - 1
        self._ended = False
        given = _UniqueId()
        given.content[:] = unique_id
        nccl.call("ncclCommInitRank", ctypes.byref(self._comm), count, given, rank)

    def exchange(self, op: str, source: int, target: int, count: int, stream: Any) -> None:
        """Exchange float32 values from `source` to `target` by `op` (walk.py, Exchanged): `count` values of each rank.
        A reduce_scatter reads `count` values for each rank. The root of "reduce" and "broadcast" is the last rank."""
        name, takes = _EXCHANGES[op]
        given = {"op": _SUM, "root": self._last}
        facts = (source, target, count, _FLOAT32, *(given[name] for name in takes))
        self._nccl.call(name, *facts, self._comm, c_void_p(int(stream)))

    def abort(self) -> None:
        """Abort pending calls, whatever the other ranks do. Any thread may call this."""
        if not self._ended:
            self._ended = True
            self._nccl.call("ncclCommAbort", self._comm)

    def close(self) -> None:
        """Destroy the communicator."""
        if not self._ended:
            self._ended = True
            self._nccl.call("ncclCommDestroy", self._comm)


def join(nccl: Nccl, unique_id: bytes, rank: int, count: int, enter: Any) -> Communicator:
    """Make a Communicator; DeviceError if the other ranks do not join in time. enter: makes the device current in a
    thread."""
    found: list[Communicator | BaseException] = []

    def begin() -> None:
        try:
            enter()
            found.append(Communicator(nccl, unique_id, rank, count))
        except DeviceError as error:
            found.append(error)

    thread = Thread(target=begin, daemon=True, name="icc-nccl")
    thread.start()
    thread.join(START_S)
    if not found:
        raise DeviceError(f"rank {rank} has not met the others by NCCL within {START_S:.0f} s")
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]
