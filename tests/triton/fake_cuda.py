"""A CUDA driver without a GPU: device memory is host memory, kernels run in Triton's interpreter.

The stream is lazy: work on it runs only when the host waits, so that a host buffer which is reused too early gives
wrong results.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from building import GpuEngine
from icc.compiler.backends.triton.interpreter import TORCH_TYPES, launch
from icc.compiler.backends.triton.spec import LaunchSpec
from icc.runtime.executor.cuda.device import CudaDevice
from icc.runtime.executor.cuda.driver import Cuda
from icc.runtime.executor.hip.bindings import CALLS
from icc.runtime.executor.player import Player


class _Flags:
    """Stands for any enumeration of the driver."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeHip:
    """Stands for libamdhip64.so, over a FakeDriver: results are written through pointer arguments, handles are
    numbers."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self._handles: dict[int, Any] = {}
        self._functions = {function: call for call, (function, _) in CALLS.items()}

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("_") or name not in self._functions:
            raise AttributeError(name)
        return partial(self._call, self._functions[name])

    def _call(self, name: str, *args: Any) -> int:
        given = [a.value for a in args if hasattr(a, "value")]
        if name == "cuMemAllocUncached":
            name = "cuMemAlloc"
            given.pop()  # flags
        function = getattr(self._driver, name)
        given = [self._handles.get(value, value) if isinstance(value, int) else value for value in given]
        if name == "cuMemAllocHost":
            given.pop()  # flags
        if name == "cuDeviceGetAttribute":
            given[0] = {23: "MAJOR", 61: "MINOR"}[given[0]]
        if name == "cuModuleGetFunction":
            assert isinstance(given[1], bytes)
        status, *results = function(*given)
        for place, result in zip((a._obj for a in args if hasattr(a, "_obj")), results, strict=False):
            place.value = result if isinstance(result, int | float) else self._handle(result)
        return status

    def _handle(self, thing: Any) -> int:
        number = (1 << 60) + len(self._handles)  # distinct from addresses and sizes
        self._handles[number] = thing
        return number

    def hipDeviceGetName(self, text: Any, size: Any, device: Any) -> int:  # noqa: N802
        text.value = self._driver.name.encode()
        return 0

    def hipIpcGetMemHandle(self, found: Any, pointer: Any) -> int:  # noqa: N802
        status, handle = self._driver.cuIpcGetMemHandle(pointer.value)
        found._obj.reserved = handle.reserved
        return status

    def hipIpcOpenMemHandle(self, found: Any, handle: Any, flags: Any) -> int:  # noqa: N802
        status, found._obj.value = self._driver.cuIpcOpenMemHandle(handle, flags.value)
        return status

    @property
    def hipGetErrorString(self) -> Any:  # noqa: N802
        return partial(lambda status: b"an illegal memory access was encountered")


class FakeDriver:
    """Stands for `cuda.bindings.driver`. `specs`: the kernels by the bytes of their "cubin"."""

    CUstream_flags = CUdevice_attribute = CUevent_flags = CUfunction_attribute = CUstreamCaptureMode = _Flags()
    CUfunc_cache = CUlaunchAttributeID = CUstream_flags

    def __init__(
        self, specs: Mapping[bytes, LaunchSpec], capability: tuple[int, int] = (9, 0), version: int = 12080,
        free: int = 8 << 30, count: int = 1, dry: bool = False, name: str = "Fake GPU",
        fill: int = 255,
    ) -> None:  # fmt: skip
        """dry: kernels do nothing. fill: the value of bytes that were never written. free: bytes of free memory."""
        self.dry, self.name, self.fill = dry, name, fill
        self.specs, self.capability, self.version, self.free, self.count = specs, capability, version, free, count
        self.memory: dict[int, ctypes.Array[Any]] = {}
        self.live: Counter[str] = Counter()  # objects that exist, by kind
        self.queue: list[Callable[[], None]] = []
        self.multiprocessors = 132
        self.draining = Lock()  # one thread at a time runs the work on the stream
        self.captured: list[Callable[[], None]] | None = None
        self.graph_launches = self.eager_launches = self.warps_launched = 0
        self.dependent: set[bool] = set()  # of all launches: whether they may begin before the last kernel has ended
        self.fail: str | None = None  # the function that fails from now on
        self.fail_at = -1  # the number of the call that fails
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("cu") or name in ("cuInit", "cuGetErrorString"):
            return found
        if name == self.fail:
            return lambda *args: (700,)
        return partial(self._called, name, found)

    def _called(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        self.calls.append(name)
        return (700,) if len(self.calls) - 1 == self.fail_at else function(*args)

    def cuInit(self, flags: int) -> tuple[int]:  # noqa: N802
        return (0,)

    def cuGetErrorString(self, status: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"an illegal memory access was encountered"

    def cuDeviceGetCount(self) -> tuple[int, int]:  # noqa: N802
        return 0, self.count

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:  # noqa: N802
        return 0, ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, str]:  # noqa: N802
        return self._made("context")

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[int]:  # noqa: N802
        return self._gone("context")

    def cuCtxSetCurrent(self, context: str) -> tuple[int]:  # noqa: N802
        return (0,)

    def cuDeviceGetName(self, size: int, device: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, self.name.encode() + b"\0\0"

    def cuDeviceGetAttribute(self, kind: str, device: int) -> tuple[int, int]:  # noqa: N802
        if kind.endswith("MULTIPROCESSOR_COUNT"):
            return 0, self.multiprocessors
        return 0, self.capability[kind.endswith("MINOR")]

    def cuDriverGetVersion(self) -> tuple[int, int]:  # noqa: N802
        return 0, self.version

    def cuMemGetInfo(self) -> tuple[int, int, int]:  # noqa: N802
        return 0, self.free, 16 << 30

    def cuStreamCreate(self, flags: str) -> tuple[int, str]:  # noqa: N802
        return self._made("stream")

    def cuStreamDestroy(self, stream: str) -> tuple[int]:  # noqa: N802
        return self._gone("stream")

    def cuMemAlloc(self, nbytes: int) -> tuple[int, int]:  # noqa: N802
        raw = (ctypes.c_uint8 * (nbytes + 256))()
        address = -(-ctypes.addressof(raw) // 256) * 256
        ctypes.memset(address, self.fill, nbytes)
        self.memory[address] = raw
        return 0, address

    def cuMemFree(self, address: int) -> tuple[int]:  # noqa: N802
        assert not self.queue, "freed while the stream has work"
        del self.memory[address]
        return (0,)

    cuMemAllocHost, cuMemFreeHost = cuMemAlloc, cuMemFree  # noqa: N815

    def cuMemcpyHtoDAsync(self, to: int, source: int, nbytes: int, stream: str) -> tuple[int]:  # noqa: N802
        return self._put(lambda: ctypes.memmove(to, source, nbytes))

    cuMemcpyDtoHAsync = cuMemcpyDtoDAsync = cuMemcpyHtoDAsync  # noqa: N815

    def cuMemsetD8Async(self, to: int, value: int, nbytes: int, stream: str) -> tuple[int]:  # noqa: N802
        return self._put(lambda: ctypes.memset(to, value, nbytes))

    def cuStreamSynchronize(self, stream: str) -> tuple[int]:  # noqa: N802
        with self.draining:
            while self.queue:
                self.queue.pop(0)()
        return (0,)

    def cuEventCreate(self, flags: str) -> tuple[int, Any]:  # noqa: N802
        self.live["event"] += 1
        return 0, SimpleNamespace(passed=True)

    def cuEventDestroy(self, event: Any) -> tuple[int]:  # noqa: N802
        return self._gone("event")

    def cuEventRecord(self, event: Any, stream: str) -> tuple[int]:  # noqa: N802
        event.passed = False
        return self._put(lambda: setattr(event, "passed", True))

    def cuEventSynchronize(self, event: Any) -> tuple[int]:  # noqa: N802
        with self.draining:
            while not event.passed:
                self.queue.pop(0)()
        return (0,)

    def cuEventElapsedTime(self, start: Any, end: Any) -> tuple[int, float]:  # noqa: N802
        """(status, milliseconds); here the number of launched warps, so that the test knows the "fastest" tiling."""
        return 0, float(self.warps_launched)

    def cuModuleLoadData(self, binary: bytes) -> tuple[int, LaunchSpec]:  # noqa: N802
        self.live["module"] += 1
        return 0, self.specs[binary]

    def cuModuleUnload(self, module: LaunchSpec) -> tuple[int]:  # noqa: N802
        return self._gone("module")

    def cuModuleGetFunction(self, module: LaunchSpec, name: bytes) -> tuple[int, LaunchSpec]:  # noqa: N802
        assert module.entry == name.decode()
        return 0, module

    def cuFuncSetAttribute(self, *args: Any) -> tuple[int]:  # noqa: N802
        return (0,)

    def cuFuncSetCacheConfig(self, *args: Any) -> tuple[int]:  # noqa: N802
        return (0,)

    @staticmethod
    def CUlaunchAttribute() -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(value=SimpleNamespace())

    CUlaunchConfig = SimpleNamespace

    def cuLaunchKernelEx(self, config: Any, spec: LaunchSpec, params: int, extra: int) -> tuple[int]:  # noqa: N802
        """Such a kernel may start before its inputs are written, so its source must wait for them first."""
        [attribute] = config.attrs
        assert config.numAttrs == attribute.value.programmaticStreamSerializationAllowed == 1
        assert attribute.id.endswith("PROGRAMMATIC_STREAM_SERIALIZATION") and config.hStream is not None
        assert spec.dependent and spec.source.count("gdc_wait()") == 1
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        block = config.blockDimX, config.blockDimY, config.blockDimZ
        self.dependent.add(True)
        return self._launch(spec, *grid, *block, config.sharedMemBytes, config.hStream, params, extra)

    def cuLaunchKernel(self, spec: LaunchSpec, *args: Any) -> tuple[int]:  # noqa: N802
        self.dependent.add(False)
        return self._launch(spec, *args)

    def _launch(self, spec: LaunchSpec, *args: Any) -> tuple[int]:
        grid, threads, params = args[:3], args[3], args[8]
        assert threads == 32 * spec.num_warps and all(grid)
        pointers = (ctypes.c_uint64 * (len(spec.args) + 2)).from_address(params)
        kinds = [ctypes.c_uint64 if arg.type.startswith("*") else ctypes.c_int32 for arg in spec.args]
        values = tuple(kind.from_address(at).value for kind, at in zip(kinds, pointers, strict=False))
        assert not any(ctypes.c_uint64.from_address(at).value for at in pointers[-2:])  # Triton's own, unused
        for arg, value in zip(spec.args, values, strict=True):
            assert not arg.aligned or value % 16 == 0, f"{spec.entry}: {arg.name} was compiled as a multiple of 16"
        self.eager_launches += self.captured is None
        self.warps_launched = spec.num_warps
        return self._put(lambda: None if self.dry else self._run(spec, grid, values))

    def cuStreamBeginCapture(self, stream: str, mode: str) -> tuple[int]:  # noqa: N802
        self.captured = []
        return (0,)

    def cuStreamEndCapture(self, stream: str) -> tuple[int, list[Callable[[], None]]]:  # noqa: N802
        graph, self.captured = self.captured, None
        assert graph is not None
        self.live["captured"] += 1
        return 0, graph

    def cuGraphInstantiate(self, graph: list[Callable[[], None]], flags: int) -> tuple[int, Any]:  # noqa: N802
        self.live["graph"] += 1
        return 0, graph

    def cuGraphDestroy(self, graph: Any) -> tuple[int]:  # noqa: N802
        return self._gone("captured")

    def cuGraphExecDestroy(self, graph: Any) -> tuple[int]:  # noqa: N802
        return self._gone("graph")

    def cuGraphLaunch(self, graph: list[Callable[[], None]], stream: str) -> tuple[int]:  # noqa: N802
        self.graph_launches += 1
        for work in graph:
            self._put(work)
        return (0,)

    def _made(self, name: str) -> tuple[int, str]:
        self.live[name] += 1
        return 0, name

    def _gone(self, name: str) -> tuple[int]:
        self.live[name] -= 1
        assert self.live[name] >= 0, f"{name} freed twice"
        self.live += Counter()  # removes zeros
        return (0,)

    def _put(self, work: Callable[[], Any]) -> tuple[int]:
        (self.queue if self.captured is None else self.captured).append(work)
        return (0,)

    def _run(self, spec: LaunchSpec, grid: tuple[int, ...], values: tuple[int, ...]) -> None:
        args = [v if not a.type.startswith("*") else self._tensor(v, a.type) for v, a in zip(values, spec.args)]  # noqa: B905
        launch(spec, grid, args)

    def _tensor(self, address: int, kind: str) -> torch.Tensor:
        for start, raw in self.memory.items():
            room = ctypes.addressof(raw) + len(raw) - address
            if start <= address and room > 0:
                dtype = TORCH_TYPES[kind.removeprefix("*")]
                nbytes = room // dtype.itemsize * dtype.itemsize
                return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=dtype)
        raise AssertionError(f"{address:#x} is not device memory")

    CUipcMem_flags = CUstream_flags
    CUipcMemHandle = SimpleNamespace

    def cuIpcGetMemHandle(self, pointer: int) -> tuple[int, SimpleNamespace]:  # noqa: N802
        assert pointer in self.memory
        return 0, SimpleNamespace(reserved=pointer.to_bytes(64, "little"))

    def cuIpcOpenMemHandle(self, handle: Any, flags: str) -> tuple[int, int]:  # noqa: N802
        self.live["shared"] += 1
        return 0, int.from_bytes(handle.reserved, "little")

    def cuIpcCloseMemHandle(self, pointer: int) -> tuple[int]:  # noqa: N802
        return self._gone("shared")


@dataclass
class OnDisk:
    """A GPU engine whose objects are files that contain their own names, and the driver's table of launch specs."""

    engine: Any
    memory: GpuEngine
    table: dict[bytes, Any]

    def executor(self, driver: FakeDriver | None = None, **options: Any) -> tuple[Player[CudaDevice], FakeDriver]:
        driver = driver or FakeDriver(self.table)
        return Player(CudaDevice(self.engine, cuda=Cuda(bindings=driver), **options)), driver
