"""Sums of which each rank computes some rows, and the gather of all rows, through memory that all ranks see or with a
communicator.

For a sum a rank reads only its own rows from the others, and for a gather only theirs: both together move as many bytes
as a ring. Steps that are not divided (`Phase.own`) have whole sums, and nothing to gather.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .....runtime.format.elements import ITEM_SIZE
from .....runtime.format.exchange import MAX_RANKS
from .....runtime.format.manifest import Limits
from .....runtime.format.plan import EVEN_TOKENS, FIRST_OWN, OWN_TOKENS, Exchange, Extent, extent
from ....links import half_ring_seconds, part_seconds
from ....program.own_rows import divides
from ....program.steps import collective as steps
from ....targets import Target
from ..spec import ONE, Arg, LaunchSpec, Shape, size_arg
from ..tiling.choice import Tuner
from .collective import CollectiveKernel

_ANY = 1 << 30  # more rows than any step has
_WORD = 4  # bytes: ranks exchange float32, or other values in words of 32 bits


@dataclass(frozen=True)
class DividedKernel(CollectiveKernel):
    """The base of both kernels. step: `ReduceScatter` or `GatherRows`."""

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        if not divides(self.step.least, shape.max_tokens, shape.decode):
            return self.undivided(shape, limits, tuner)
        sized, target = self._sized(shape, limits), tuner.target
        if not target.sees_others:
            return (sized.alone(self.pointers(x="x_ptr", y="y_ptr")),)
        return (sized.kernel(target, sized.exchange_of(target) if not shape.typical else None),)

    def undivided(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        """The launches of phases whose steps are not divided."""
        raise NotImplementedError

    def exchange_of(self, target: Target) -> Exchange | None:
        nbytes = _WORD * self.tokens * self.elements
        ranks = self.step.ranks
        faster = half_ring_seconds(nbytes, ranks, target) < part_seconds(nbytes, ranks, target)
        return self._exchange() if faster else None

    def _exchange(self, only: bool = False) -> Exchange:
        return Exchange(self.step.op, Extent(self.elements), only)


@dataclass(frozen=True)
class ReduceScatterKernel(DividedKernel):
    """y = the sum of the ranks' x; each rank gets its own rows."""

    @property
    def rows(self) -> tuple[Arg, ...]:
        return size_arg(FIRST_OWN), size_arg(OWN_TOKENS)

    def undivided(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        step = self.step
        whole = steps.AllReduce(kernel=step.kernel, rows=step.rows, x=step.x, y=step.y, n=step.n, ranks=step.ranks)
        return CollectiveKernel(whole).launches(shape, limits, tuner)


@dataclass(frozen=True)
class GatherRowsKernel(DividedKernel):
    """Every rank gets all rows of x, each from the rank that owns it. Values of 16 bits are sent in pairs."""

    @classmethod
    def refusal(cls, step: Any) -> str:
        if step.n * ITEM_SIZE[step.x.dtype] % _WORD:
            return f"rows of {step.n} elements of {step.x.dtype} are gathered by ranks, and are no whole words"
        return f"{step.ranks} ranks: at most {MAX_RANKS}" if step.ranks > MAX_RANKS else ""

    @property
    def elements(self) -> int:
        """Words of a row."""
        return self.step.n * ITEM_SIZE[self.step.x.dtype] // _WORD

    @property
    def rows(self) -> tuple[Arg, ...]:
        return (size_arg(EVEN_TOKENS),)

    def undivided(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        return ()

    def rendered(self, template: str, args: tuple[Arg, ...], target: Target) -> LaunchSpec:
        """As `CollectiveKernel.rendered`; the grid is empty in a step that is not divided."""
        spec = super().rendered(template, args, target)
        return replace(spec, grid=(extent(EVEN_TOKENS, _ANY, self.programs), ONE, ONE))
