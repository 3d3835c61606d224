"""Kernels of the tests as Triton compiles them, without a GPU: ICC_ON_PTX=h100 python -m pytest tests/triton -k ..

Each launch is compiled for the target (once; objects are kept among temporary files), and `ptx_machine` runs its PTX
instead of Triton's interpreter its source. Slow: for single kernels. sm_80 to sm_90.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from icc.compiler.backends.triton import interpreter
from icc.compiler.backends.triton.objects import compile as objects
from icc.compiler.backends.triton.spec import LaunchSpec
from icc.compiler.interrupt import Processes
from icc.compiler.targets import TARGETS
from ptx_machine import Machine

_FORMAT = "1"


def install(target: str) -> None:
    """Make `interpreter.launch` run PTX."""
    interpreter.instead = lambda spec, grid, args: launch(spec, grid, args, target)


def launch(
    spec: LaunchSpec, grid: tuple[int, ...], args: Sequence[torch.Tensor | int], target: str, **how: bool
) -> None:
    """As `interpreter.launch`. how: fields of Machine."""
    text, shared = ptx(spec, target)
    x, y, z = (*grid, 1, 1)[:3]
    Machine(text, 32 * spec.num_warps, shared, (x, y, z), args, **how).run()


def ptx(spec: LaunchSpec, target: str) -> tuple[str, int]:
    """A kernel's PTX and its bytes of shared memory."""
    folder = Path(tempfile.gettempdir(), "icc-ptx", _FORMAT, objects._triton_version(), TARGETS[target].arch)
    kept = folder / objects.spec_key(spec)
    if not kept.exists():
        found = objects._compile(_worker(), objects.spec_key(spec), spec, TARGETS[target])
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{kept.name}.{os.getpid()}"
        part.write_text(f"// {found.shared_bytes}\n{found.ir}")
        part.rename(kept)
    first, _, text = kept.read_text().partition("\n")
    return text, int(first.split()[1])


def plain_ir(spec: LaunchSpec, target: str = "h100") -> str:
    """A kernel's Triton IR without layouts; nothing is compiled from it."""
    return objects._compile(_worker("ttir_worker.py"), objects.spec_key(spec), spec, TARGETS[target]).ir


@cache
def _worker(script: str = "ptx_worker.py") -> objects._Worker:
    """A compiling process whose script replaces the usual worker: it returns PTX, or only Triton's IR without
    layouts."""
    plain = objects._WORKER
    try:
        objects._WORKER = Path(__file__).with_name(script)
        return objects._Worker(Processes().__enter__())
    finally:
        objects._WORKER = plain
