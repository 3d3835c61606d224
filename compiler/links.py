"""A model of the seconds that ranks need to exchange values, by the rate of the links between them."""

from __future__ import annotations

from .targets import Target

# GPUs, in seconds: until signals of others are seen, until a ring has begun, and per step of a ring. Taken from
# published timings of NCCL and of one-shot kernels over NVLink; icc measured none of them.
_TOLD, _BEGUN, _STEP = 4e-6, 8e-6, 1e-6
_SHARE = 0.6  # share of a link's rate that reads of one-shot kernels reach; rings reach 0.8
_RING_SHARE = 0.8
# Rings between GPUs that do not see each other's memory, over PCI Express and the host's memory; from published runs of
# all_reduce_perf: 41 us for 8 bytes on 8 x RTX 4090 (NVIDIA/nccl #1530), 20 of 32 GB/s across a host's bridges
# (NVIDIA/nccl-tests #178).
_HOST_STEP, _HOST_SHARE = 2.4e-6, 0.6
_MET = 1.5e-6  # seconds until ranks on CPUs have met in shared memory: benchmarks/rank_sums.py


def one_shot_seconds(nbytes: float, ranks: int, target: Target) -> float:
    """Seconds of a sum over GPUs of `nbytes` on each rank, where each reads the bytes of all others."""
    return _TOLD + (ranks - 1) * nbytes / (target.link * 1e9 * _SHARE)


def ring_seconds(nbytes: float, ranks: int, target: Target) -> float:
    """Seconds of the same sum in a ring: each rank passes on its own part of the sum, then the result."""
    return _BEGUN + 2 * (ranks - 1) * _pass_seconds(nbytes / ranks, target)


def half_ring_seconds(nbytes: float, ranks: int, target: Target) -> float:
    """Seconds of a ring that leaves each rank its own part of a sum of `nbytes`, or that gathers the parts."""
    return _BEGUN + (ranks - 1) * _pass_seconds(nbytes / ranks, target)


def _pass_seconds(nbytes: float, target: Target) -> float:
    """Seconds of a step of a ring, in which each rank passes on `nbytes`."""
    step, share = (_STEP, _RING_SHARE) if target.sees_others else (_HOST_STEP, _HOST_SHARE)
    return step + nbytes / (target.link * 1e9 * share)


def part_seconds(nbytes: float, ranks: int, target: Target) -> float:
    """Seconds that a rank takes to read its own part of a sum of `nbytes` from all others, or to read their parts."""
    return read_seconds(nbytes * (ranks - 1) / ranks, target)


def divided_seconds(nbytes: float, ranks: int, target: Target) -> float:
    """Seconds of half of a sum of `nbytes` on each rank, which ranks divide, or of gathering their parts of `nbytes` in
    all, in the faster way that the target has."""
    if target.backend == "cpu":
        return part_seconds(nbytes, ranks, target)
    ring = half_ring_seconds(nbytes, ranks, target)
    return min(part_seconds(nbytes, ranks, target), ring) if target.sees_others else ring


def sum_seconds(nbytes: float, ranks: int, target: Target) -> float:
    """Seconds of a sum of `nbytes` on each rank; on GPUs in the faster of the two ways above that the target has."""
    if target.backend == "cpu":
        return _MET + (ranks - 1) * nbytes / (target.link * 1e9)
    ring = ring_seconds(nbytes, ranks, target)
    return min(one_shot_seconds(nbytes, ranks, target), ring) if target.sees_others else ring


def read_seconds(nbytes: float, target: Target) -> float:
    """Seconds that a rank takes to read `nbytes` of another rank's memory once they are written."""
    if target.backend == "cpu":
        return _MET + nbytes / (target.link * 1e9)
    return _TOLD + nbytes / (target.link * 1e9 * _SHARE)
