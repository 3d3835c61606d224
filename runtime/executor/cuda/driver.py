"""The CUDA driver API as the executor uses it: checked calls, memory, modules, launches, graphs.

HIP's runtime comes under the same names (executor/hip/bindings.py). The only place that imports cuda-bindings. Every
failure is a DeviceError that names the call.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from ...errors import DeviceError, install

_CAPTURES_DEPENDENT = 12030  # CUDA's version from which graphs keep that a kernel may begin early
_HINT = "run `nvidia-smi` to see whether the driver works"


@dataclass(frozen=True)
class DeviceFacts:
    """What a device is: compute capability, the CUDA version of its driver (12080 is 12.8), memory in bytes."""

    name: str
    capability: tuple[int, int]
    driver_version: int
    free_bytes: int
    total_bytes: int


def load_bindings() -> Any:
    """`cuda.bindings.driver`; DeviceError if it is not installed or there is no driver."""
    # all kernels when their modules are loaded: loaded lazily, the first launch of each may fall into a capture
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    try:
        bindings = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DeviceError(f"cuda-bindings cannot be imported: {error}", install("cuda")) from None
    try:
        status = bindings.cuInit(0)[0]
    except RuntimeError as error:  # cuda-bindings looks for libcuda.so when it is first called
        raise DeviceError(f"this machine has no CUDA driver: {error}", "run the engine on its GPU host") from None
    if status:
        raise DeviceError(f"there is no usable GPU: {_describe(bindings, status)}", _HINT)
    return bindings


def _describe(bindings: Any, status: Any) -> str:
    found = bindings.cuGetErrorString(status)[1]
    return found.decode() if isinstance(found, bytes) else str(status)


class Cuda:
    """One device with a stream. Everything it gave out is freed by `close`.

    A thread must `enter` before it uses the device; the one that made this has.
    """

    def __init__(self, ordinal: int = 0, bindings: Any = None) -> None:
        self.api = bindings or load_bindings()
        self._failed = False
        count = self.call("cuDeviceGetCount")
        if not count:
            raise DeviceError("this machine has no GPU", "run the engine on a machine that has its GPU")
        if ordinal >= count:
            raise DeviceError(f"there is no GPU {ordinal}", f"this machine has {count}, numbered from 0")
        self.ordinal, self._device = ordinal, self.call("cuDeviceGet", ordinal)
        self._context = self.call("cuDevicePrimaryCtxRetain", self._device)
        self._closers: list[Callable[[], None]] = [lambda: self.call("cuDevicePrimaryCtxRelease", self._device)]
        self._threads = threading.local()
        self.stream: Any = None
        self.capturing = threading.Lock()  # held while what any thread puts on the stream becomes part of a graph
        self._graphs: dict[int, Any] = {}
        self.uploaded: dict[int, tuple[Any, dict[str, int]]] = {}  # by id: weights, and the address of each by name
        try:
            self.enter()
            self.stream = self.call("cuStreamCreate", self.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        except DeviceError:
            self.close()
            raise
        self._closers.append(lambda: self.call("cuStreamDestroy", self.stream))

    def enter(self) -> None:
        """Make the device this thread's: the driver keeps a current context per thread."""
        if not hasattr(self._threads, "entered"):
            self.call("cuCtxSetCurrent", self._context)
            self._threads.entered = True

    def call(self, name: str, *args: Any) -> Any:
        """Call a driver function; its result, or the tuple of its results. DeviceError if it fails."""
        status, *results = getattr(self.api, name)(*args)
        if status:
            self._failed = True
            shown = getattr(self.api, "name_of", str)(name)
            hint = getattr(self.api, "hint", _HINT)
            raise DeviceError(f"{shown} failed: {_describe(self.api, status)}", hint)
        return results[0] if len(results) == 1 else tuple(results)

    def facts(self) -> DeviceFacts:
        """What the device is, now."""
        kinds = self.api.CUdevice_attribute
        major = self.call("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self._device)
        minor = self.call("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self._device)
        name = self.call("cuDeviceGetName", 128, self._device).split(b"\0")[0].decode()
        free, total = self.call("cuMemGetInfo")
        return DeviceFacts(name, (major, minor), self.call("cuDriverGetVersion"), free, total)

    def multiprocessors(self) -> int:
        """How many the device has: of a part of one (MIG), how many the part has."""
        kinds = self.api.CUdevice_attribute
        return int(self.call("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, self._device))

    def bandwidth(self) -> float:
        """GB/s of the device's memory by its clock and the width of its bus, as its maker states it."""
        kinds = self.api.CUdevice_attribute
        clock = self.call("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, self._device)  # kHz
        width = self.call("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, self._device)
        return 2 * clock * 1e3 * width / 8 / 1e9  # two transfers per cycle

    # memory

    def allocate(self, nbytes: int) -> int:
        """Device memory, aligned to 256 bytes; its address."""
        pointer = int(self.call("cuMemAlloc", max(nbytes, 256)))
        self._closers.append(lambda: self.call("cuMemFree", pointer))
        return pointer

    def pinned(self, nbytes: int) -> np.ndarray:
        """Page-locked host memory as uint8 `[nbytes]`."""
        pointer = int(self.call("cuMemAllocHost", nbytes))
        self._closers.append(lambda: self.call("cuMemFreeHost", pointer))
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))

    def to_device(self, pointer: int, host: np.ndarray, stream: Any = None) -> None:
        """Copy a contiguous host array of any shape to the device, in the order of the stream, or of another one."""
        self.call("cuMemcpyHtoDAsync", pointer, host.ctypes.data, host.nbytes, stream or self.stream)

    def to_host(self, host: np.ndarray, pointer: int) -> None:
        """Copy from the device into a contiguous host array of any shape, in the order of the stream."""
        self.call("cuMemcpyDtoHAsync", host.ctypes.data, pointer, host.nbytes, self.stream)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the device, in the order of the stream."""
        self.call("cuMemcpyDtoDAsync", target, source, nbytes, self.stream)

    def zero(self, pointer: int, nbytes: int) -> None:
        """Fill with zeros, in the order of the stream."""
        self.call("cuMemsetD8Async", pointer, 0, nbytes, self.stream)

    def wait(self) -> None:
        """Until all that was put on the stream is done."""
        self.call("cuStreamSynchronize", self.stream)

    def event(self) -> Any:
        """An event, to be recorded on the stream."""
        created = self.call("cuEventCreate", self.api.CUevent_flags.CU_EVENT_DEFAULT)
        self._closers.append(lambda: self.call("cuEventDestroy", created))
        return created

    def record(self, event: Any) -> None:
        """Mark this point of the stream."""
        self.call("cuEventRecord", event, self.stream)

    def wait_event(self, event: Any) -> None:
        """Until the device has passed the marked point."""
        self.call("cuEventSynchronize", event)

    def seconds(self, work: Callable[[], None]) -> float:
        """How long the device takes for what `work` puts on the stream."""
        start, end = self._timers
        self.record(start)
        work()
        self.record(end)
        self.wait_event(end)
        return self.call("cuEventElapsedTime", start, end) / 1000

    @cached_property
    def _timers(self) -> tuple[Any, Any]:
        return self.event(), self.event()

    # memory of other processes

    def allocate_seen(self, nbytes: int) -> int:
        """As `allocate`, memory whose changes other GPUs see while a kernel runs: on AMD's, that no cache holds."""
        call = "cuMemAllocUncached" if hasattr(self.api, "cuMemAllocUncached") else "cuMemAlloc"
        pointer = int(self.call(call, nbytes))
        self._closers.append(lambda: self.call("cuMemFree", pointer))
        return pointer

    def share(self, pointer: int) -> bytes:
        """What another process opens memory by that `allocate_seen` has given."""
        return bytes(self.call("cuIpcGetMemHandle", pointer).reserved)

    def open_shared(self, handle: bytes) -> int:
        """The address here of memory that another process has on a GPU that this one reaches."""
        found = self.api.CUipcMemHandle()
        found.reserved = handle
        flags = self.api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        pointer = int(self.call("cuIpcOpenMemHandle", found, flags))
        self._closers.append(lambda: self.call("cuIpcCloseMemHandle", pointer))
        return pointer

    def side_stream(self) -> Any:
        """A stream for what must not wait for this one's."""
        stream = self.call("cuStreamCreate", self.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._closers.append(lambda: self.call("cuStreamDestroy", stream))
        return stream

    # kernels

    def function(self, binary: bytes, entry: str, shared_bytes: int) -> Any:
        """A kernel of a cubin, allowed the dynamic shared memory that it needs."""
        module = self.call("cuModuleLoadData", binary)
        self._closers.append(lambda: self.call("cuModuleUnload", module))
        function = self.call("cuModuleGetFunction", module, entry.encode())
        if shared_bytes:  # beyond 48 KiB, what the driver itself takes included, a kernel must ask
            kind = self.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call("cuFuncSetAttribute", function, kind, shared_bytes)
        if shared_bytes > 48 << 10:  # as Triton's own launcher does: room for several blocks
            self.call("cuFuncSetCacheConfig", function, self.api.CUfunc_cache.CU_FUNC_CACHE_PREFER_SHARED)
        return function

    def launch(
        self, function: Any, grid: Sequence[int], threads: int, shared_bytes: int, params: int, dependent: bool = False
    ) -> None:
        """Put a kernel on the stream. params: the address of an array of the addresses of its parameters, all of which
        are read before this returns. dependent: it may begin before the kernel before it has ended, for which it waits
        itself."""
        if not (dependent and self.overlaps):
            self.call("cuLaunchKernel", function, *grid, threads, 1, 1, shared_bytes, self.stream, params, 0)
            return
        config = self._dependent
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.sharedMemBytes = threads, shared_bytes
        self.call("cuLaunchKernelEx", config, function, params, 0)

    @cached_property
    def overlaps(self) -> bool:
        """Whether kernels that wait themselves are launched before the ones before them have ended: where the driver
        can capture such launches, which HIP does not have, unless the environment variable ICC_DEPENDENT_LAUNCH is 0.
        """
        if os.environ.get("ICC_DEPENDENT_LAUNCH") == "0" or not hasattr(self.api, "cuLaunchKernelEx"):
            return False
        return self.call("cuDriverGetVersion") >= _CAPTURES_DEPENDENT

    @cached_property
    def _dependent(self) -> Any:
        """What such launches have in common, to be filled in."""
        attribute, config = self.api.CUlaunchAttribute(), self.api.CUlaunchConfig()
        attribute.id = self.api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
        config.blockDimY = config.blockDimZ = 1
        config.hStream = self.stream
        return config

    def capture(self, work: Callable[[], None]) -> Any:
        """What `work` puts on the stream, as a graph that can be launched; nothing of it runs now."""
        with self.capturing:
            return self._capture(work)

    def _capture(self, work: Callable[[], None]) -> Any:
        mode = self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call("cuStreamBeginCapture", self.stream, mode)
        try:
            work()
        except BaseException:
            with suppress(DeviceError):  # the capture ends, with nothing to show for it
                self.call("cuGraphDestroy", self.call("cuStreamEndCapture", self.stream))
            raise
        graph = self.call("cuStreamEndCapture", self.stream)
        try:
            executable = self.call("cuGraphInstantiate", graph, 0)
        finally:
            self.call("cuGraphDestroy", graph)
        self._graphs[id(executable)] = executable
        return executable

    def forget_graph(self, graph: Any) -> None:
        """Free a captured graph; where it still runs, when it has."""
        self.call("cuGraphExecDestroy", self._graphs.pop(id(graph)))

    def launch_graph(self, graph: Any) -> None:
        """Put a captured graph on the stream."""
        self.call("cuGraphLaunch", graph, self.stream)

    def close(self) -> None:
        """Wait for the stream, then free everything, last given out first. Calling it again does nothing.

        What cannot be freed keeps nothing else from it; then DeviceError, unless an earlier failure was told already.
        """
        self.uploaded.clear()
        told = self._failed
        failures: list[DeviceError] = []
        closers, self._closers = self._closers, []
        if not closers:
            return
        graphs = [partial(self.forget_graph, graph) for graph in self._graphs.values()]
        first = (
            [self.enter, self.wait] if self.stream is not None else [self.enter]
        )  # a kernel may still use what is freed
        for step in (*first, *graphs, *reversed(closers)):
            try:
                step()
            except DeviceError as error:
                failures.append(error)
        if failures and not told:
            raise failures[0]
