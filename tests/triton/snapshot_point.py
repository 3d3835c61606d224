"""The input of a snapshot of a Triton template: one launch of one kernel at small params."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from icc.compiler.backends.triton.kernels.pending import PendingKernel
from icc.compiler.backends.triton.kernels.sample import SampleKernel
from icc.compiler.backends.triton.plan import kernel_of
from icc.compiler.backends.triton.spec import LaunchSpec, Shape
from icc.compiler.backends.triton.tiling.choice import Config, Tuner
from icc.compiler.targets import TARGETS
from icc.runtime.format.manifest import Limits
from step_making import make_step

LIMITS = Limits(max_seq_len=256, max_batch_size=4, max_step_tokens=32)
DECODE, MIXED = Shape(4, True), Shape(32, False)


@dataclass(frozen=True)
class Point:
    """One launch (by number) of one kernel. `types`: of its operands, "" for an absent one. tiling: replaces the choice
    of the target's cost model."""

    op: str
    params: dict[str, Any]
    types: tuple[str, ...] = ()
    shape: Shape = MIXED
    launch: int = 0
    target: str = "h100"
    tiling: Config | None = None

    def spec(self) -> LaunchSpec:
        if self.op in AROUND:
            kernel = AROUND[self.op](**self.params)
        else:
            aligned = tuple(kind != "f32" for kind in self.types)
            kernel = kernel_of(make_step(self.op, self.types, aligned, **self.params))
        return kernel.launches(self.shape, LIMITS, Fixed(TARGETS[self.target], self.tiling))[self.launch]


class Fixed(Tuner):
    """A tuner that picks the given tiling if the kernel offers tilings, and the second option of other choices."""

    def __init__(self, target: Any, config: Config | None) -> None:
        super().__init__(target)
        object.__setattr__(self, "config", config)

    def pick(self, key: str, candidates: Any, cost: Any) -> Config:
        config: Config | None = self.config  # type: ignore[attr-defined]
        if config is None or ("splits" in candidates[0] and "m" not in candidates[0]):
            return candidates[min(1, len(candidates) - 1)]
        return config


AROUND: dict[str, Any] = {"pending": PendingKernel, "sample": SampleKernel}
