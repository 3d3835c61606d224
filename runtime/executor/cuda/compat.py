"""Checks whether a device can run an engine, before a byte of the weights is read."""

from __future__ import annotations

from ...errors import CapacityError, DeviceError, DriverError
from ...format.manifest import GpuFacts
from .driver import Cuda, DeviceFacts


def open_gpu(backend: str, ordinal: int = 0) -> Cuda:
    """Open a GPU of this machine by its number. backend: the engine's, "cuda" or "hip". DeviceError if there is no such
    GPU."""
    if backend == "hip":
        from ..hip.bindings import load_hip

        return Cuda(ordinal, load_hip())
    return Cuda(ordinal)


def open_device(target: str, needs: GpuFacts, cuda: Cuda | None = None) -> Cuda:
    """The GPU, checked: DeviceError if it cannot run engines of `target`. cuda: an open GPU; None: the first one is
    opened."""
    cuda = cuda or open_gpu("hip" if needs.arch.startswith("gfx") else "cuda")
    try:
        check_device(target, needs, cuda.facts())
    except BaseException:
        cuda.close()
        raise
    return cuda


def check_device(target: str, needs: GpuFacts, device: DeviceFacts) -> None:
    """Raise DeviceError if the device does not fit: it says what the engine needs, what there is, and what to do.

    Cubins and hsacos are for one architecture. Cubins of sm_80 would load on sm_86 and sm_89, whose multiprocessors
    have less shared memory than the kernels need. The driver checks the last digit of gfx942 (9.4).
    """
    hip = needs.arch.startswith("gfx")
    major, minor = (int(needs.arch[3:-2]), int(needs.arch[-2])) if hip else divmod(int(needs.arch[3:]), 10)
    if device.capability != (major, minor):
        have = arch_name(needs.arch, device)
        raise DeviceError(
            f"the engine was compiled for {target} ({needs.arch}), this GPU is {device.name} ({have})",
            "run it on a GPU of its target, or compile the model for this GPU",
        )
    if device.driver_version < needs.driver_version:
        raise DriverError(
            f"the GPU's driver supports CUDA {_version(device.driver_version)}, the engine needs "
            f"{_version(needs.driver_version)} or newer",
            "update the NVIDIA driver",
        )


def arch_name(like: str, device: DeviceFacts) -> str:
    """The name of a device's architecture, in the same vendor's naming as `like`."""
    major, minor = device.capability
    return f"gfx{major}{minor}x" if like.startswith("gfx") else f"sm_{major}{minor}"


def check_memory(fixed_bytes: int, sequence_bytes: int, device: DeviceFacts, max_seq_len: int) -> None:
    """Raise CapacityError if weights, workspace and the KV cache of one full sequence do not fit the free memory."""
    need = fixed_bytes + sequence_bytes
    if need > device.free_bytes:
        raise CapacityError(
            f"the engine needs {_gib(need)} of GPU memory ({_gib(fixed_bytes)} for weights and workspace, "
            f"{_gib(sequence_bytes)} for one sequence of {max_seq_len} tokens), {device.name} has "
            f"{_gib(device.free_bytes)} free of {_gib(device.total_bytes)}",
            "free GPU memory, give the KV cache of an engine that is loaded already less (--kv-mib, or kv_bytes in "
            "Python), or compile with 4-bit weights or a smaller --max-seq-len",
        )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
