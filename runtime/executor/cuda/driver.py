"""The part of the CUDA driver API that the executor uses: checked calls, memory, modules, launches, graphs.

executor/hip/bindings.py offers HIP's runtime under the same names. Only this module imports cuda-bindings. Every
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

_CAPTURES_DEPENDENT = 12030  # the first CUDA version whose graphs keep the attribute that a kernel may begin early
_HINT = "run `nvidia-smi` to see whether the driver works"


@dataclass(frozen=True)
class DeviceFacts:
    """Facts of a device: name, compute capability, the CUDA version of its driver (12080 is 12.8), memory in bytes."""

    name: str
    capability: tuple[int, int]
    driver_version: int
    free_bytes: int
    total_bytes: int


def load_bindings() -> Any:
    """`cuda.bindings.driver`; DeviceError if it is not installed or there is no driver."""
    # load kernels with their modules: with lazy loading, the first launch of a kernel may fall into a capture
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
    """One device with a stream. `close` frees everything that was allocated through it.

    A thread must call `enter` before it uses the device; the thread that created this object has.
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
        self.capturing = threading.Lock()  # held during a capture, which takes in what any thread puts on the stream
        self._graphs: dict[int, Any] = {}
        self.uploaded: dict[int, tuple[Any, dict[str, int]]] = {}  # by id of the weights: they, and addresses by name
        try:
            self.enter()
            self.stream = self.call("cuStreamCreate", self.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        except DeviceError:
            self.close()
            raise
        self._closers.append(lambda: self.call("cuStreamDestroy", self.stream))

    def enter(self) -> None:
        """Make the device's context current for this thread."""
        if not hasattr(self._threads, "entered"):
            self.call("cuCtxSetCurrent", self._context)
            self._threads.entered = True

    def call(self, name: str, *args: Any) -> Any:
        """Call a driver function; returns its result, or a tuple if it has several or none. DeviceError if it fails."""
        status, *results = getattr(self.api, name)(*args)
        if status:
            self._failed = True
            shown = getattr(self.api, "name_of", str)(name)
            hint = getattr(self.api, "hint", _HINT)
            raise DeviceError(f"{shown} failed: {_describe(self.api, status)}", hint)
        return results[0] if len(results) == 1 else tuple(results)

    def facts(self) -> DeviceFacts:
        """The facts of the device; its free memory as of now."""
        kinds = self.api.CUdevice_attribute
        major = self.call("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self._device)
        minor = self.call("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self._device)
        name = self.call("cuDeviceGetName", 128, self._device).split(b"\0")[0].decode()
        free, total = self.call("cuMemGetInfo")
        return DeviceFacts(name, (major, minor), self.call("cuDriverGetVersion"), free, total)

    def multiprocessors(self) -> int:
        """The number of multiprocessors of the device, or of the MIG instance."""
        kinds = self.api.CUdevice_attribute
        return int(self.call("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, self._device))

    def bandwidth(self) -> float:
        """The nominal bandwidth of the device's memory in GB/s, from its clock and bus width."""
        kinds = self.api.CUdevice_attribute
        clock = self.call("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, self._device)  # kHz
        width = self.call("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, self._device)
        return 2 * clock * 1e3 * width / 8 / 1e9  # two transfers per cycle

    # memory

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory, aligned to 256 bytes; its address."""
        pointer = int(self.call("cuMemAlloc", max(nbytes, 256)))
        self._closers.append(lambda: self.call("cuMemFree", pointer))
        return pointer

    def pinned(self, nbytes: int) -> np.ndarray:
        """Allocate page-locked host memory, uint8 `[nbytes]`."""
        pointer = int(self.call("cuMemAllocHost", nbytes))
        self._closers.append(lambda: self.call("cuMemFreeHost", pointer))
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))

    def to_device(self, pointer: int, host: np.ndarray, stream: Any = None) -> None:
        """Copy a contiguous host array of any shape to the device, on `stream`; None: this device's stream."""
        self.call("cuMemcpyHtoDAsync", pointer, host.ctypes.data, host.nbytes, stream or self.stream)

    def to_host(self, host: np.ndarray, pointer: int) -> None:
        """Copy from the device into a contiguous host array of any shape, on the stream."""
        self.call("cuMemcpyDtoHAsync", host.ctypes.data, pointer, host.nbytes, self.stream)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the device, on the stream."""
        self.call("cuMemcpyDtoDAsync", target, source, nbytes, self.stream)

    def zero(self, pointer: int, nbytes: int) -> None:
        """Fill `nbytes` bytes with zeros, on the stream."""
        self.call("cuMemsetD8Async", pointer, 0, nbytes, self.stream)

    def wait(self) -> None:
        """Wait until all work on the stream is done."""
        self.call("cuStreamSynchronize", self.stream)

    def event(self) -> Any:
        """Create an event, to be recorded on the stream."""
        created = self.call("cuEventCreate", self.api.CUevent_flags.CU_EVENT_DEFAULT)
        self._closers.append(lambda: self.call("cuEventDestroy", created))
        return created

    def record(self, event: Any) -> None:
        """Record the event at this point of the stream."""
        self.call("cuEventRecord", event, self.stream)

    def wait_event(self, event: Any) -> None:
        """Wait until the device has passed the recorded event."""
        self.call("cuEventSynchronize", event)

    def seconds(self, work: Callable[[], None]) -> float:
        """How many seconds the device takes for what `work` puts on the stream."""
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
        """As `allocate`, but other GPUs see changes of this memory while a kernel runs: on AMD GPUs it is uncached."""
        call = "cuMemAllocUncached" if hasattr(self.api, "cuMemAllocUncached") else "cuMemAlloc"
        pointer = int(self.call(call, nbytes))
        self._closers.append(lambda: self.call("cuMemFree", pointer))
        return pointer

    def share(self, pointer: int) -> bytes:
        """A handle by which another process can open memory from `allocate_seen`."""
        return bytes(self.call("cuIpcGetMemHandle", pointer).reserved)

    def open_shared(self, handle: bytes) -> int:
        """Open memory of another process on a GPU that this one can access; its address in this process."""
        found = self.api.CUipcMemHandle()
        found.reserved = handle
        flags = self.api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        pointer = int(self.call("cuIpcOpenMemHandle", found, flags))
        self._closers.append(lambda: self.call("cuIpcCloseMemHandle", pointer))
        return pointer

    def side_stream(self) -> Any:
        """Create a second stream, for work that must not wait for the main stream."""
        stream = self.call("cuStreamCreate", self.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._closers.append(lambda: self.call("cuStreamDestroy", stream))
        return stream

    # kernels

    def function(self, binary: bytes, entry: str, shared_bytes: int) -> Any:
        """Load a kernel from a cubin and allow it the dynamic shared memory that it needs."""
        module = self.call("cuModuleLoadData", binary)
        self._closers.append(lambda: self.call("cuModuleUnload", module))
        function = self.call("cuModuleGetFunction", module, entry.encode())
        if shared_bytes:  # a kernel must ask for more than 48 KiB, including the driver's own share
            kind = self.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call("cuFuncSetAttribute", function, kind, shared_bytes)
        if shared_bytes > 48 << 10:  # as Triton's launcher does, so that several blocks fit
            self.call("cuFuncSetCacheConfig", function, self.api.CUfunc_cache.CU_FUNC_CACHE_PREFER_SHARED)
        return function

    def launch(
        self, function: Any, grid: Sequence[int], threads: int, shared_bytes: int, params: int, dependent: bool = False
    ) -> None:
        """Put a kernel on the stream. params: the address of an array of the addresses of its parameters, all of which
        are read before this returns. dependent: the kernel may begin before the previous one has ended, and waits for
        it itself (programmatic dependent launch)."""
        if not (dependent and self.overlaps):
            self.call("cuLaunchKernel", function, *grid, threads, 1, 1, shared_bytes, self.stream, params, 0)
            return
        config = self._dependent
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.sharedMemBytes = threads, shared_bytes
        self.call("cuLaunchKernelEx", config, function, params, 0)

    @cached_property
    def overlaps(self) -> bool:
        """Whether dependent kernels are launched before the previous kernel has ended: if the driver can capture such
        launches in graphs (HIP has none), unless the environment variable ICC_DEPENDENT_LAUNCH is 0.
        """
        if os.environ.get("ICC_DEPENDENT_LAUNCH") == "0" or not hasattr(self.api, "cuLaunchKernelEx"):
            return False
        return self.call("cuDriverGetVersion") >= _CAPTURES_DEPENDENT

    @cached_property
    def _dependent(self) -> Any:
        """The launch configuration that all dependent launches share; each fills in the rest."""
        attribute, config = self.api.CUlaunchAttribute(), self.api.CUlaunchConfig()
        attribute.id = self.api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
        config.blockDimY = config.blockDimZ = 1
        config.hStream = self.stream
        return config

    def capture(self, work: Callable[[], None]) -> Any:
        """Capture what `work` puts on the stream as a graph that can be launched; nothing runs now."""
        with self.capturing:
            return self._capture(work)

    def _capture(self, work: Callable[[], None]) -> Any:
        mode = self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call("cuStreamBeginCapture", self.stream, mode)
        try:
            work()
        except BaseException:
            with suppress(DeviceError):  # end the capture and drop its graph
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
        """Free a captured graph; if it still runs, the driver frees it afterwards."""
        self.call("cuGraphExecDestroy", self._graphs.pop(id(graph)))

    def launch_graph(self, graph: Any) -> None:
        """Put a captured graph on the stream."""
        self.call("cuGraphLaunch", graph, self.stream)

    def close(self) -> None:
        """Wait for the stream, then free everything in reverse order of allocation. Calling it again does nothing.

        If something cannot be freed, the rest is freed all the same; DeviceError then, unless an earlier failure was
        reported.
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
        )  # a kernel may still use the memory
        for step in (*first, *graphs, *reversed(closers)):
            try:
                step()
            except DeviceError as error:
                failures.append(error)
        if failures and not told:
            raise failures[0]
