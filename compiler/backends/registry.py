"""Which back end compiles for a target."""

from __future__ import annotations

from ..targets import Target
from .base import Backend


def backend_for(
    target: Target,
    weights: str,
    deterministic: bool = False,
    isa: str | None = None,
    os: str | None = None,
    step_kernel: bool = False,
) -> Backend:
    """The backend of a target, for a checkpoint whose weights are "f32", "bf16" or "f16".

    deterministic: a request's logits have the same bits whatever else is in its steps; on a CPU they always do. isa,
    os: the ISA levels and operating systems of a CPU target; None: the target's own. step_kernel: on CUDA, sequences of
    launches of a step with one sequence are also compiled into one launch.
    """
    if target.backend == "cpu":
        from .cpu.backend import CpuBackend

        return CpuBackend(target, weights, isa, os)
    from .triton.backend import TritonBackend

    return TritonBackend(target, weights, deterministic, step_kernel and target.backend == "cuda")
