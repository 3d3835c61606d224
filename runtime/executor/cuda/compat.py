"""Whether a device can run an engine: checked before a byte of the weights is read."""

from __future__ import annotations

from ...errors import CapacityError, DeviceError, DriverError
from ...format.manifest import GpuFacts
from .driver import Cuda, DeviceFacts


def open_device(target: str, needs: GpuFacts, cuda: Cuda | None = None) -> Cuda:
    """The GPU of this machine, if it can run engines of `target`; DeviceError otherwise."""
    cuda = cuda or Cuda()
    try:
        check_device(target, needs, cuda.facts())
    except BaseException:
        cuda.close()
        raise
    return cuda


def check_device(target: str, needs: GpuFacts, device: DeviceFacts) -> None:
    """DeviceError saying what the engine needs, what there is, and what to do.

    A cubin of sm_80 to sm_89 runs on every device of the same major capability that is not older (CUDA C programming
    guide, "Binary Compatibility"); from sm_90 on, Triton compiles for exactly that architecture.
    """
    number = int(needs.arch.removeprefix("sm_"))
    major, minor = divmod(number, 10)
    same_family = device.capability[0] == major
    fits = device.capability == (major, minor) if number >= 90 else same_family and device.capability[1] >= minor
    if not fits:
        have = f"sm_{device.capability[0]}{device.capability[1]}"
        raise DeviceError(
            f"the engine is for {target} ({needs.arch}), this GPU is {device.name} ({have})",
            "run it on a GPU of its target, or compile the model for this GPU",
        )
    if device.driver_version < needs.driver_version:
        raise DriverError(
            f"the GPU's driver supports CUDA {_version(device.driver_version)}, the engine needs "
            f"{_version(needs.driver_version)} or newer",
            "update the NVIDIA driver",
        )


def check_memory(fixed_bytes: int, sequence_bytes: int, device: DeviceFacts, max_seq_len: int) -> None:
    """CapacityError if weights, workspace and the KV cache of one full sequence do not fit the free memory."""
    need = fixed_bytes + sequence_bytes
    if need > device.free_bytes:
        raise CapacityError(
            f"the engine needs {_gib(need)} of GPU memory ({_gib(fixed_bytes)} for weights and workspace, "
            f"{_gib(sequence_bytes)} for one sequence of {max_seq_len} tokens), {device.name} has "
            f"{_gib(device.free_bytes)} free of {_gib(device.total_bytes)}",
            "free GPU memory, give the KV cache of an engine that is loaded already less (kv_bytes), or compile with "
            "4-bit weights or a smaller --max-seq-len",
        )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
