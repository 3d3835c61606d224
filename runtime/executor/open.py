"""Which device and which executor an engine runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UsageError
from ..format.load import Engine
from .base import Executor
from .player import Player

if TYPE_CHECKING:
    from .cuda.driver import Cuda


def open_executor(
    engine: Engine,
    section: str = "",
    *,
    gpu: Cuda | None = None,
    threads: int | None = None,
    kv_bytes: int | None = None,
    swap_bytes: int | None = None,
) -> Executor:
    """What runs the engine, or one section of its program, on a GPU or CPU; the options are those of LoadOptions."""
    if gpu is None:
        if engine.manifest.gpu is not None:
            raise UsageError("an engine for a GPU cannot draft for one that runs on the CPU")
        if swap_bytes:
            raise UsageError("swap_bytes is for GPU engines: the KV cache of a CPU engine is host memory already")
        from .cpu.device import CpuDevice

        return Player(CpuDevice(engine, threads, kv_bytes, section))
    from .cuda.device import CudaDevice

    return Player(CudaDevice(engine, kv_bytes, gpu, section, swap_bytes))
