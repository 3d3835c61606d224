"""A generated kernel library and its C interface (codegen_templates/cpp/abi.h), through ctypes."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, c_char, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING

from ...address import address_of
from ...errors import EngineAbiError, EngineFormatError, IccError
from ...format.batch import CPU_INPUTS, OUTPUTS
from ...format.manifest import KERNEL_ABI

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

    from .rank_memory import RankMemory

# The fields of struct icc_batch in their order: arrays of a step, and integers.
BATCH_FIELDS = (
    "num_tokens", "num_seqs", "num_logit_rows", "max_blocks", "greedy", "token_ids", "positions", "slot_mapping",
    "seq_starts", "context_lens", "block_tables", "logit_rows", "logits", "parents", "moves", "num_moves", "drafts",
    "prompt_lens",
)  # fmt: skip
_ARRAYS = {array.name for array in (*CPU_INPUTS, *OUTPUTS)}


class IccBatch(Structure):
    """struct icc_batch of abi.h; array fields are addresses."""

    _fields_ = tuple((name, c_void_p if name in _ARRAYS else c_int32) for name in BATCH_FIELDS)


_GONE = "a process of the engine's ranks has ended", "load the engine again"
_loaded: dict[str, str] = {}  # sha256 of a library -> the path under which the dynamic loader has loaded it
_folders: list[TemporaryDirectory[str]] = []  # removed when the process ends


class KernelLibrary:
    """The typed functions of a kernel library, loaded from its bytes. Calls release the GIL.

    EngineFormatError if `name` is no library, or has another ABI version; IccError if the bytes cannot be written to
    where the dynamic loader reads them.
    """

    def __init__(self, image: bytes, name: str) -> None:
        path = loadable_path(image, name)
        try:
            library = self._library = ctypes.CDLL(path, mode=getattr(os, "RTLD_NOW", 0))
            library.icc_abi_version.restype = c_int32
            if (found := library.icc_abi_version()) != KERNEL_ABI["cpu"]:  # it may lack the functions below
                raise EngineAbiError(name, found, KERNEL_ABI["cpu"])
            self._create, self._step, self._destroy = library.icc_create, library.icc_step, library.icc_destroy
            self._section = library.icc_section
        except (OSError, AttributeError) as error:
            raise EngineFormatError(f"{name} is not a kernel library: {error}", "compile the model again") from error
        self._create.restype = c_void_p
        self._create.argtypes = (c_int32, POINTER(c_void_p), c_void_p, c_void_p, POINTER(c_int64))
        self._step.restype = c_int32
        self._step.argtypes = (c_void_p, POINTER(IccBatch))
        self._section.restype = c_int32
        self._section.argtypes = (c_void_p, c_int32, POINTER(IccBatch))
        self._destroy.restype = None
        self._destroy.argtypes = (c_void_p,)

    def digest_pieces(self, data: memoryview, size: int, following: c_int64, digests: Array[c_char]) -> None:
        """Write the BLAKE3 digests (32 bytes each) of pieces of `size` bytes, at most PIECE, into `digests`, beginning
        with piece number `following`. Several threads may call this with the same `following` and `digests`; the GIL is
        released. EngineFormatError if the library cannot compute digests.
        """
        try:
            compute = self._library.icc_blake3
        except AttributeError as error:
            raise EngineFormatError(f"a kernel library makes no digests: {error}", "compile the model again") from error
        compute.restype, compute.argtypes = None, (c_void_p, c_int64, c_int64, POINTER(c_int64), c_void_p)
        compute(address_of(data), len(data), size, following, digests)

    def largest(self, logits: int, rows: int, width: int) -> list[int] | None:
        """The index of the largest value (the first of equals) of each row of float32 `[rows, width]` at address
        `logits`; -1 if the largest is not finite or a value is NaN. None if the library lacks this function."""
        try:
            look = self._library.icc_largest
        except AttributeError:
            return None
        look.restype, look.argtypes = None, (c_void_p, c_int32, c_int64, POINTER(c_int32))
        found = (c_int32 * rows)()
        look(logits, rows, width, found)
        return list(found)

    def scratch(self, num_threads: int) -> tuple[int, int]:
        """Bytes of working memory of a handle: of its threads, and shared; (0, 0) if the library lacks this
        function."""
        found = c_int64(), c_int64()
        try:
            tell = self._library.icc_scratch
        except AttributeError:
            return 0, 0
        tell.restype, tell.argtypes = None, (c_int32, POINTER(c_int64), POINTER(c_int64))
        tell(num_threads, *found)
        return found[0].value, found[1].value

    def shared_touched(self, num_threads: int, sequences: int, length: int) -> int:
        """How many bytes of a handle's shared working memory are touched with so many sequences of `length` tokens."""
        try:
            tell = self._library.icc_shared_touched
        except AttributeError:
            return self.scratch(num_threads)[1]
        tell.restype, tell.argtypes = c_int64, (c_int32, c_int32, c_int32)
        return tell(num_threads, sequences, length)

    def create(self, num_threads: int, weights: list[int], arena: int, kv: int, num_blocks: Sequence[int]) -> int:
        """A handle over memory that must outlive it: addresses of the weights, the arena and the KV cache. num_blocks:
        of each KV group. IccError if it cannot start."""
        pointers = self._pointers = (c_void_p * max(len(weights), 1))(*weights)  # the library keeps its address
        counts = (c_int64 * max(len(num_blocks), 1))(*num_blocks)
        handle = self._create(num_threads, pointers, arena, kv, counts)
        if not handle:
            raise IccError("the kernel library could not start", "try fewer threads, or look at the memory limits")
        return handle

    def bind_inputs(self, handle: int, inputs: list[int]) -> None:
        """Tell the library the addresses of the inputs that the program declares, in its order, turn by turn; they must
        outlive the handle. EngineFormatError if the library takes no inputs."""
        pointers = self._inputs = (c_void_p * len(inputs))(*inputs)  # the library keeps its address
        try:
            bind = self._library.icc_inputs
        except AttributeError as error:
            raise EngineFormatError(f"the library takes no inputs: {error}", "compile the model again") from error
        bind.restype, bind.argtypes = None, (c_void_p, POINTER(c_void_p))
        bind(handle, pointers)

    def step(self, handle: int, batches: Array[IccBatch]) -> None:
        """Run the program once on a step; batches: one per KV group. IccError with the library's code if it fails."""
        code = self._step(handle, batches)
        if code != 0:
            raise IccError(f"a step failed in the kernel library with code {code}")

    def section(self, handle: int, section: int, batches: Array[IccBatch]) -> None:
        """Run one section of the program on rows of the last step. IccError with the library's code if it fails."""
        code = self._section(handle, section, batches)
        if code != 0:
            raise IccError(f"section {section} failed in the kernel library with code {code}")

    def join_ranks(self, handle: int, rank: int, count: int, threads: int, memory: RankMemory) -> None:
        """Make a handle rank `rank` of `count`, each with so many threads. EngineFormatError if the library does not
        support ranks."""
        try:
            join = self._library.icc_join_ranks
        except AttributeError as error:
            raise EngineFormatError(f"the library runs alone: {error}", "compile the model again") from error
        join.restype = None
        join.argtypes = (c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_int64)
        join(handle, rank, count, threads, memory.control, memory.slots, memory.slot_bytes)

    @property
    def has_turns(self) -> bool:
        """Whether ranks of a pipeline may have several steps in flight, each with its own arrays."""
        return hasattr(self._library, "icc_begin")

    def begin(self, handle: int, section: int, turn: int, batches: Array[IccBatch]) -> None:
        """Begin a step, or a section in its place (-1: none), over the arrays of a turn; returns when this rank has
        done its part. IccError with the library's code if it fails."""
        begin = self._library.icc_begin
        begin.restype, begin.argtypes = c_int32, (c_void_p, c_int32, c_int32, POINTER(IccBatch))
        if code := begin(handle, section, turn, batches):
            raise IccError(f"a step failed in the kernel library with code {code}")

    def end(self, handle: int, turn: int) -> None:
        """Wait until all ranks have done the last step that was begun in a turn. IccError if a rank has ended."""
        end = self._library.icc_end
        end.restype, end.argtypes = c_int32, (c_void_p, c_int32)
        if end(handle, turn):
            raise IccError(*_GONE)

    def follow(self, handle: int, batches: Array[IccBatch], turns: int = 1) -> int:
        """Run what rank 0 posts, until rank 0 ends (result 0) or a rank is gone (2). batches: one per KV group, for
        each turn."""
        if self.has_turns:
            follow = self._library.icc_follow_turns
            follow.restype, follow.argtypes = c_int32, (c_void_p, POINTER(IccBatch), c_int32)
            return int(follow(handle, batches, turns))
        self._library.icc_follow.restype, self._library.icc_follow.argtypes = c_int32, (c_void_p, POINTER(IccBatch))
        return int(self._library.icc_follow(handle, batches))

    def zero_on_ranks(self, handle: int, offset: int, nbytes: int) -> None:
        """Fill a part of the KV caches of all ranks with zeros. IccError if a rank is gone."""
        zero = self._library.icc_rank_zero
        zero.restype, zero.argtypes = c_int32, (c_void_p, c_int64, c_int64)
        if zero(handle, offset, nbytes):
            raise IccError(*_GONE)

    def copy_on_ranks(self, handle: int, source: int, target: int, nbytes: int) -> None:
        """Copy `nbytes` bytes within the KV cache of each rank. IccError if a rank is gone."""
        copy = self._library.icc_rank_copy
        copy.restype, copy.argtypes = c_int32, (c_void_p, c_int64, c_int64, c_int64)
        if copy(handle, source, target, nbytes):
            raise IccError(*_GONE)

    def write_on_ranks(self, handle: int, weight: int, offset: int, nbytes: int, only: int = 0) -> None:
        """Make all other ranks, or rank `only`, copy the first `nbytes` bytes of the shared slots to byte `offset` of a
        weight, or of their arena (-1). IccError if a rank is gone."""
        write = self._library.icc_rank_write
        write.restype, write.argtypes = c_int32, (c_void_p, c_int32, c_int64, c_int64, c_int32)
        if write(handle, weight, offset, nbytes, only):
            raise IccError(*_GONE)

    def want_of_ranks(self, handle: int, wanted: int) -> None:
        """Make the following steps return only so many of the largest logits of each row; 0: all."""
        want = self._library.icc_rank_wanted
        want.restype, want.argtypes = None, (c_void_p, c_int32)
        want(handle, wanted)

    def given_to_ranks(self, handle: int) -> int:
        """How many bytes this rank has sent to the others so far."""
        given = self._library.icc_rank_given
        given.restype, given.argtypes = c_int64, (c_void_p,)
        return int(given(handle))

    def end_ranks(self, handle: int) -> None:
        """Make the other ranks leave `follow`."""
        end = self._library.icc_rank_end
        end.restype, end.argtypes = None, (c_void_p,)
        end(handle)

    def destroy(self, handle: int) -> None:
        """Free a handle and end its threads."""
        self._destroy(handle)


def loadable_path(image: bytes, name: str) -> str:
    """A path from which the dynamic loader loads exactly these bytes, the content of the engine's file `name`.

    It names an anonymous sealed file, which nobody can change or replace; if the system has none, a file in a folder of
    this process. The loader caches libraries by path for the life of the process, so the file is kept: its path must
    never name other bytes. IccError if it cannot be written.
    """
    digest = hashlib.sha256(image).hexdigest()
    if digest not in _loaded:
        sealed = hasattr(os, "memfd_create")
        try:
            _loaded[digest] = _sealed_file(image, digest) if sealed else _own_file(image)
        except OSError as error:
            raise _no_copy(name, len(image), error) from error
    return _loaded[digest]


def _no_copy(name: str, size: int, error: OSError) -> IccError:
    """The error for a library, `size` bytes, of which no copy can be made for the dynamic loader."""
    said = f"{name} is loaded from a copy of {-(-size // 1024)} KiB, which cannot be written: {error.strerror}"
    limited = "raise the limit on the size of files: ulimit -f"
    return IccError(said, limited if error.errno == errno.EFBIG else "look at the memory and the temporary directory")


def _sealed_file(image: bytes, digest: str) -> str:
    import fcntl

    descriptor = os.memfd_create(f"icc-{digest[:12]}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as stream:
            stream.write(image)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(descriptor)
        raise
    return f"/proc/self/fd/{descriptor}"


def _own_file(image: bytes) -> str:
    from tempfile import TemporaryDirectory

    folder = TemporaryDirectory(prefix="icc-kernels-", ignore_cleanup_errors=True)  # readable by this user only
    _folders.append(folder)
    path = os.path.join(folder.name, "kernels.so")
    with open(path, "wb") as stream:
        stream.write(image)
    return path
