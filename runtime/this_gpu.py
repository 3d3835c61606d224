"""Finds the GPU of this machine through its driver."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import DeviceError
from .executor.cuda.compat import open_gpu

SIGNS = {"cuda": Path("/proc/driver/nvidia/gpus"), "hip": Path("/dev/kfd")}  # errors of a driver that has found a GPU


@dataclass(frozen=True)
class Gpu:
    """The first GPU that a driver lists. backend: "cuda" or "hip". capability: (major, minor), (9, 4) for gfx942."""

    backend: str
    name: str
    capability: tuple[int, int]


def target_named(device: str, names: Iterable[str]) -> str | None:
    """The target that fits the driver's name of a GPU; None if none does. Vendors write "RTX 4060 Ti" and
    "A100-SXM4-80GB", in which adjacent words form the target's name."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    runs = {"".join(words[a:b]) for a in range(len(words)) for b in range(a + 1, len(words) + 1)}
    return max((name for name in names if name in runs), key=len, default=None)


def gpu_here() -> Gpu | None:
    """The first GPU, NVIDIA's before AMD's; None if there is none. DeviceError if a driver has found one that cannot be
    used."""
    for backend, sign in SIGNS.items():
        try:
            device = open_gpu(backend)
        except DeviceError:
            if sign.exists():
                raise
            continue
        try:
            facts = device.facts()
        finally:
            device.close()
        return Gpu(backend, facts.name, facts.capability)
    return None
