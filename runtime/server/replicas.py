"""The load options of each replica of an engine: its share of the cores and the memory, or its GPU."""

from __future__ import annotations

import re
from dataclasses import replace

from ..errors import UsageError
from ..executor.cpu.cores import read_cores, usable_cores
from ..executor.cpu.memory import available_bytes
from ..format.footprint import KV_SHARES
from ..format.manifest import Manifest
from ..options import LoadOptions

MOST = 64


def replica_loads(load: LoadOptions, manifest: Manifest, count: int, devices: str | None) -> list[LoadOptions]:
    """The options of each of `count` replicas.

    On CPUs, --cores with as many parts as replicas gives each replica one part; otherwise cores and threads are divided
    evenly. The memory for KV caches is divided evenly too, unless `load` sets it. devices: numbers of GPUs, assigned in
    turn; None: `load.device` for all. UsageError for a wrong number of replicas, or wrong devices.
    """
    if not 1 <= count <= MOST:
        raise UsageError(f"--replicas {count} is not from 1 to {MOST}")
    if devices is not None and (manifest.main.libraries or load.device is not None):
        raise UsageError("--devices is for GPU engines, without --device", "on a CPU, give --cores 0-7,8-15")
    if not manifest.main.libraries:
        return [replace(load, device=number) for number in _devices(devices, load.device, count)]
    if count == 1:
        return [load]
    cores = _cores(load.cores, count)
    budget = load.kv_bytes
    if budget is None:
        budget = int(available_bytes() * KV_SHARES["cpu"]) // count
    return [replace(load, cores=own, threads=load.threads or _threads(own, count), kv_bytes=budget) for own in cores]


def _threads(cores: str | None, count: int) -> int:
    """Threads of a replica. cores: its cores; None: its share of all cores."""
    return max(usable_cores(None) // count if cores is None else usable_cores(read_cores(cores)), 1)


def _devices(text: str | None, device: int | None, count: int) -> list[int | None]:
    if text is None:
        return [device] * count
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise UsageError(f"--devices {text!r} is no list of GPUs", "give their numbers: --devices 0,1")
    found = [int(part) for part in text.split(",")]
    if len(found) > count:
        raise UsageError(f"--devices names {len(found)} GPUs for {count} replicas", f"add --replicas {len(found)}")
    return [found[number % len(found)] for number in range(count)]


def _cores(text: str | None, count: int) -> list[str | None]:
    """The cores of each replica, in the form of LoadOptions; None for all cores."""
    if text is None:
        return [None] * count
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == count:
        return list(parts)
    found = sorted(read_cores(text))
    if len(found) < count:
        raise UsageError(f"--cores {text} has {len(found)} cores for {count} replicas")
    size = len(found) // count
    return [",".join(map(str, found[number * size : (number + 1) * size])) for number in range(count)]
