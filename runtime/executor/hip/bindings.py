"""AMD's HIP runtime through ctypes, under the names of CUDA's driver API as the executor calls them.

HIP has the functions of that API under other names (HIP programming guide, "CUDA driver API functions supported by
HIP"), so one executor runs on both. Functions without a counterpart do nothing: kernels need not ask for shared memory,
and a device has one context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from types import SimpleNamespace
from typing import Any

from ...errors import DeviceError

LIBRARY = "libamdhip64.so"
HINT = "run `rocm-smi` to see whether the driver works"


class _Out:
    """A result, which HIP writes to the address in an argument."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


_PTR, _COUNT, _NUMBER = c_void_p, c_size_t, c_int
_NEW = _Out(c_void_p)
# HIP's function and its arguments in order: results, types of the caller's arguments, or constants
CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "cuInit": ("hipInit", (c_uint,)),
    "cuDeviceGetCount": ("hipGetDeviceCount", (_Out(c_int),)),
    "cuDeviceGet": ("hipDeviceGet", (_Out(c_int), _NUMBER)),
    "cuCtxSetCurrent": ("hipSetDevice", (_NUMBER,)),
    "cuDeviceGetAttribute": ("hipDeviceGetAttribute", (_Out(c_int), _NUMBER, _NUMBER)),
    "cuDriverGetVersion": ("hipDriverGetVersion", (_Out(c_int),)),
    "cuMemGetInfo": ("hipMemGetInfo", (_Out(c_size_t), _Out(c_size_t))),
    "cuStreamCreate": ("hipStreamCreateWithFlags", (_NEW, c_uint)),
    "cuStreamDestroy": ("hipStreamDestroy", (_PTR,)),
    "cuStreamSynchronize": ("hipStreamSynchronize", (_PTR,)),
    "cuMemAlloc": ("hipMalloc", (_NEW, _COUNT)),
    "cuMemAllocUncached": ("hipExtMallocWithFlags", (_NEW, _COUNT, c_uint(3))),  # hipDeviceMallocUncached
    "cuMemFree": ("hipFree", (_PTR,)),
    "cuMemAllocHost": ("hipHostMalloc", (_NEW, _COUNT, c_uint(0))),
    "cuMemFreeHost": ("hipHostFree", (_PTR,)),
    "cuMemcpyHtoDAsync": ("hipMemcpyHtoDAsync", (_PTR, _PTR, _COUNT, _PTR)),
    "cuMemcpyDtoHAsync": ("hipMemcpyDtoHAsync", (_PTR, _PTR, _COUNT, _PTR)),
    "cuMemcpyDtoDAsync": ("hipMemcpyDtoDAsync", (_PTR, _PTR, _COUNT, _PTR)),
    "cuMemsetD8Async": ("hipMemsetD8Async", (_PTR, c_ubyte, _COUNT, _PTR)),
    "cuEventCreate": ("hipEventCreateWithFlags", (_NEW, c_uint)),
    "cuEventDestroy": ("hipEventDestroy", (_PTR,)),
    "cuEventRecord": ("hipEventRecord", (_PTR, _PTR)),
    "cuEventSynchronize": ("hipEventSynchronize", (_PTR,)),
    "cuEventElapsedTime": ("hipEventElapsedTime", (_Out(c_float), _PTR, _PTR)),
    "cuIpcCloseMemHandle": ("hipIpcCloseMemHandle", (_PTR,)),
    "cuModuleLoadData": ("hipModuleLoadData", (_NEW, c_char_p)),
    "cuModuleUnload": ("hipModuleUnload", (_PTR,)),
    "cuModuleGetFunction": ("hipModuleGetFunction", (_NEW, _PTR, c_char_p)),
    "cuLaunchKernel": ("hipModuleLaunchKernel", (_PTR, *[c_uint] * 7, _PTR, _PTR, _PTR)),
    "cuStreamBeginCapture": ("hipStreamBeginCapture", (_PTR, _NUMBER)),
    "cuStreamEndCapture": ("hipStreamEndCapture", (_PTR, _NEW)),
    "cuGraphInstantiate": ("hipGraphInstantiateWithFlags", (_NEW, _PTR, c_ulonglong)),
    "cuGraphDestroy": ("hipGraphDestroy", (_PTR,)),
    "cuGraphExecDestroy": ("hipGraphExecDestroy", (_PTR,)),
    "cuGraphLaunch": ("hipGraphLaunch", (_PTR, _PTR)),
}


class IpcHandle(ctypes.Structure):
    """hipIpcMemHandle_t. reserved: its bytes."""

    _fields_ = (("content", c_ubyte * 64),)

    @property
    def reserved(self) -> bytes:
        """The bytes to send to another process."""
        return bytes(self.content)

    @reserved.setter
    def reserved(self, given: bytes) -> None:
        self.content[:] = given


class HipApi:
    """Takes the place of cuda-bindings in `Cuda`. Every function returns a tuple of its status and its results."""

    hint = HINT
    # numbers of hip_runtime_api.h, the same from HIP 5 to 7
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DEFAULT=0)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUfunc_cache = SimpleNamespace(CU_FUNC_CACHE_PREFER_SHARED=1)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=23, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=61,
        CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH=59, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE=60,
    )  # fmt: skip

    def __init__(self, library: Any) -> None:
        """library: the loaded libamdhip64.so."""
        self._library = library
        for name, (function, arguments) in CALLS.items():
            setattr(self, name, _bound(getattr(library, function), arguments))

    CUipcMemHandle = IpcHandle
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)

    def cuIpcGetMemHandle(self, pointer: int) -> tuple[int, IpcHandle]:  # noqa: N802
        """(status, the handle by which another process opens this memory)."""
        found = IpcHandle()
        return self._library.hipIpcGetMemHandle(ctypes.byref(found), c_void_p(pointer)), found

    def cuIpcOpenMemHandle(self, handle: IpcHandle, flags: int) -> tuple[int, int | None]:  # noqa: N802
        """(status, the address in this process; None if it fails). HIP takes the handle by value."""
        found = c_void_p()
        return self._library.hipIpcOpenMemHandle(ctypes.byref(found), handle, c_uint(flags)), found.value

    @staticmethod
    def name_of(call: str) -> str:
        """HIP's name for a function."""
        return CALLS[call][0] if call in CALLS else call.replace("cu", "hip", 1)

    def cuGetErrorString(self, status: int) -> tuple[int, bytes]:  # noqa: N802
        """(0, the text of a status); HIP's function returns the text, not a status."""
        function = self._library.hipGetErrorString
        function.restype = c_char_p
        return 0, function(c_int(status))

    def cuDeviceGetName(self, size: int, device: int) -> tuple[int, bytes]:  # noqa: N802
        """(status, the name in `size` bytes, padded with zeros)."""
        text = ctypes.create_string_buffer(size)
        return self._library.hipDeviceGetName(text, c_int(size), c_int(device)), text.raw

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:  # noqa: N802
        """(0, the device): in HIP a device is its own context."""
        return 0, device

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[int]:  # noqa: N802
        """(0,): HIP keeps the primary context, and there is nothing to release."""
        return (0,)

    def cuFuncSetAttribute(self, *args: Any) -> tuple[int]:  # noqa: N802
        """(0,): kernels may use all of a compute unit's shared memory without asking."""
        return (0,)

    cuFuncSetCacheConfig = cuFuncSetAttribute  # noqa: N815


def _bound(function: Any, arguments: tuple[Any, ...]) -> Callable[..., tuple[Any, ...]]:
    """A function of the library that takes only its inputs and returns its status and its results."""
    plain = [a for a in arguments if not isinstance(a, _Out)]
    if len(plain) == len(arguments) and all(isinstance(a, type) for a in arguments):  # without results
        return lambda *given: (function(*(kind(value) for kind, value in zip(arguments, given, strict=True))),)

    def call(*given: Any) -> tuple[Any, ...]:
        inputs, passed, results = iter(given), [], []
        for argument in arguments:
            if isinstance(argument, _Out):
                results.append(argument.kind())
                passed.append(ctypes.byref(results[-1]))
            else:
                passed.append(argument(next(inputs)) if isinstance(argument, type) else argument)
        status = function(*passed)
        return status, *(result.value for result in results)

    return call


def load_hip() -> HipApi:
    """Load this machine's HIP runtime; DeviceError if there is none, or no GPU that it can use."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        hint = "run the engine on its GPU host, with ROCm"
        raise DeviceError(f"this machine has no HIP runtime: {error}", hint) from None
    api = HipApi(library)
    if status := api.cuInit(0)[0]:  # type: ignore[attr-defined]
        raise DeviceError(f"there is no usable GPU: {api.cuGetErrorString(status)[1].decode()}", HINT)
    return api
