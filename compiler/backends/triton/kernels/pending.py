"""Fills in the tokens that a step begins with and that the step before it has just sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .....runtime.format.manifest import Limits
from .....runtime.format.plan import SampledArg, extent
from ...render import render
from ..spec import ONE, Arg, LaunchSpec, Shape, TritonKernel, batch_arg, size_arg
from ..tiling.choice import Tuner


@dataclass(frozen=True, kw_only=True)
class PendingKernel(TritonKernel):
    """token_ids[t] = sampled[-1 - token_ids[t]] where token_ids[t] < 0, in place."""

    template: ClassVar[str] = "triton/pending.py.jinja"
    block: int = 128

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        args = (
            Arg("token_ptr", "*i32", batch_arg("token_ids").value),
            Arg("sampled_ptr", "*i32", SampledArg("token")),
            size_arg("num_tokens"),
        )
        grid = (extent("num_tokens", self.block), ONE, ONE)
        return (LaunchSpec(render(self.template, self), "pending", args, grid, num_warps=1),)
