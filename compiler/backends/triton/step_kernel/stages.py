"""Kernels as stages of a step kernel: their tilings, and whether the cost model expects a gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..spec import LaunchSpec, Shape, TritonKernel
from ..tiling.choice import Config, Tuner
from ..tiling.machine import Machine
from ..tiling.whole import LAUNCHES, StageProduct, WholeTilings


@dataclass(frozen=True)
class Stages:
    """The kernels of a program in steps of one shape. render: the launches of a kernel, by a tuner's answers."""

    kernels: Mapping[str, TritonKernel]
    shape: Shape
    tuner: Tuner
    render: Callable[[TritonKernel, Tuner], tuple[LaunchSpec, ...]]

    @cached_property
    def _products(self) -> dict[str, StageProduct | None]:
        return {name: kernel.stage_product(self.shape, self.tuner) for name, kernel in self.kernels.items()}

    def whole(self, launches: Mapping[str, int], waits: int) -> WholeTilings:
        """The tilings that a run may have. launches: tiled launches, by kernel; waits: how many of these wait for
        others."""
        stages: list[StageProduct | None] = []
        for name, count in launches.items():
            stages += [self._products[name], *[None] * (count - 1)]
        return WholeTilings(Machine(self.tuner.target), tuple(stages), waits)

    def choose(self, key: str, whole: WholeTilings) -> Config:
        """How many programs a multiprocessor must hold; LAUNCHES for no step kernel."""
        return self.tuner.pick(key, whole.candidates(), whole.seconds)

    def why_launches(self, key: str, whole: WholeTilings) -> str:
        """Why no step kernel was chosen."""
        refused = [refusal for refusal in self.tuner.refused if refusal.key == key]
        best = min((whole.seconds(c) for c in whole.candidates() if c != LAUNCHES), default=float("inf"))
        if refused and best < whole.seconds(LAUNCHES):
            return f"no step kernel passes the checks, the first {refused[0].reason}"
        return f"launches are faster by the model, {1e6 * whole.seconds(LAUNCHES):.1f} us to {1e6 * best:.1f}"

    def launches(self, names: Sequence[str], tilings: Mapping[str, Config]) -> dict[str, tuple[LaunchSpec, ...]]:
        """The launches of kernels as stages with these tilings."""
        tuner = Tuner(self.tuner.target, {**self.tuner.tuned, **tilings}, self.tuner.refused)
        return {name: self.render(self.kernels[name].staged(), tuner) for name in names}
