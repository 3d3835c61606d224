"""Opens the device and the executor that a program runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..errors import UsageError
from ..format.load import Engine
from ..format.manifest import MAIN
from .base import Executor
from .player import Player

if TYPE_CHECKING:
    from .cuda.driver import Cuda


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """The part of this machine that an executor may use. gpu: an open device for a GPU engine; None for a CPU engine.
    cores: the cores to which kernel threads are pinned; None: see `preferred_cores`. more_blocks: blocks of each KV
    group for compiled prompts, added to those that fit a CPU's kv_bytes. shares_cache: whether this process must reach
    the KV caches of all CPU ranks, see KVExecutor. For the other fields see LoadOptions."""

    gpu: Cuda | None = None
    threads: int | None = None
    cores: frozenset[int] | None = None
    kv_bytes: int | None = None
    swap_bytes: int | None = None
    more_blocks: tuple[int, ...] = ()
    shares_cache: bool = False


def open_executor(
    engine: Engine, program: str = MAIN, section: str = "", resources: Resources | None = None
) -> Executor:
    """Open an executor that runs a program of the engine on a GPU or CPU, or only one section of it. resources: None
    for the defaults on a CPU. EngineFormatError if the engine has no program of that name; UsageError for a GPU engine
    without a GPU in `resources`, and for `swap_bytes` with a CPU engine."""
    if program != engine.name:
        engine = engine.open_program(program)
    given = resources or Resources()
    if given.gpu is None:
        if engine.manifest.gpu is not None:
            raise UsageError("an engine for a GPU cannot draft for one that runs on the CPU")
        if given.swap_bytes:
            raise UsageError("swap_bytes is for GPU engines: the KV cache of a CPU engine is host memory already")
        asked = (engine, given.threads, given.kv_bytes, section, given.cores)
        if engine.manifest.ranks > 1:
            from .cpu.ranked import RankedDevice

            return Player(RankedDevice(*asked, more_blocks=given.more_blocks, shares_cache=given.shares_cache))
        from .cpu.device import CpuDevice

        return Player(CpuDevice(*asked, more_blocks=given.more_blocks))
    if engine.manifest.ranks > 1:
        from .cuda.ranked import RankedCudaDevice

        return Player(RankedCudaDevice(engine, given.kv_bytes, given.gpu, section, given.swap_bytes))
    from .cuda.device import CudaDevice

    return Player(CudaDevice(engine, given.kv_bytes, given.gpu, section, given.swap_bytes))
