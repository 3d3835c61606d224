"""Collective operations of ranks: through memory that all ranks see, piece by piece, or with a communicator.

A rank reads the pieces of all others at once (one-shot, as the custom all-reduce of TensorRT-LLM and vLLM for small
messages): least time until the first byte, but all bytes of all ranks over a rank's link. A communicator's ring moves
fewer bytes in more steps. See collective_rows.py for sums that are divided by rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from .....runtime.format.exchange import EXCHANGE, MAX_RANKS, ExchangeArea
from .....runtime.format.manifest import Limits
from .....runtime.format.plan import RANK, AreaArg, Exchange, Extent, extent
from ....links import one_shot_seconds, ring_seconds
from ....program.steps import collective as steps
from ....targets import Target
from ...render import render
from ..spec import ONE, Arg, LaunchSpec, Shape, StepKernel, scratch_arg, size_arg
from ..tiling.choice import Tuner, power_of_two

_GATHERED = "gathered"  # scratch
_LINES = "triton/gathered.py.jinja"
_LEAST = 512  # least elements of a piece: fewer do not fill a link's packets
_PER_THREAD = 8


@dataclass(frozen=True)
class CollectiveKernel(StepKernel[Any]):
    """y = the x of all ranks, summed or concatenated. step: `AllReduce` or `AllGather`."""

    template: ClassVar[str] = "triton/collective.py.jinja"
    area: ClassVar[ExchangeArea] = EXCHANGE
    tokens: int = 1  # in the largest step of a phase
    arguments: tuple[Arg, ...] = ()

    @classmethod
    def refusal(cls, step: Any) -> str:
        if step.x.dtype != "f32" or step.y.dtype != "f32":
            return "ranks exchange float32 only"
        if step.ranks > MAX_RANKS:
            return f"{step.ranks} ranks: at most {MAX_RANKS} GPUs see each other's memory"
        return super().refusal(step)

    @property
    def gathers(self) -> bool:
        """Whether the ranks' values are concatenated, not summed."""
        return isinstance(self.step, steps.AllGather)

    @property
    def entry(self) -> str:
        """The name of the rendered function."""
        found: str = self.step.op
        return found

    @property
    def elements(self) -> int:
        """Elements of a row of one rank."""
        found: int = self.step.widths()["x"]
        return found

    @property
    def areas(self) -> list[str]:
        """The arguments that are the ranks' areas."""
        return [f"area{rank}_ptr" for rank in range(self.step.ranks)]

    @property
    def block(self) -> int:
        """Elements of a piece: as few as give every program one piece, but enough to fill a link's packets."""
        each = -(-self.tokens * self.elements // EXCHANGE.programs)
        return min(max(power_of_two(each), _LEAST), EXCHANGE.piece)

    @property
    def programs(self) -> int:
        """Programs of the largest step."""
        return min(-(-self.tokens * self.elements // self.block), EXCHANGE.programs)

    @property
    def args(self) -> tuple[Arg, ...]:
        """The arguments: x, y, the number of rows, the rank, its own area and those of all ranks."""
        areas = [Arg(name, "*fp32", AreaArg(rank)) for rank, name in enumerate(self.areas)]
        own = Arg("own_ptr", "*fp32", AreaArg())
        return (*self.pointers(x="x_ptr", y="y_ptr"), self.count, size_arg(RANK), *self.rows, own, *areas)

    @property
    def rows(self) -> tuple[Arg, ...]:
        """The arguments that say which rank owns which rows, if ranks divide them."""
        return ()

    @property
    def signature(self) -> str:
        """The parameters of the rendered function."""
        return ", ".join(arg.name for arg in self.arguments)

    def scratch(self, shape: Shape, limits: Limits, tuner: Tuner) -> dict[str, int]:
        if not self.gathers or tuner.target.sees_others:
            return {}
        return {_GATHERED: 4 * self._sized(shape, limits).tokens * self.elements * self.step.ranks}

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        sized, target = self._sized(shape, limits), tuner.target
        if target.sees_others:
            return (sized.kernel(target, sized.exchange_of(target) if not shape.typical else None),)
        if not self.gathers:
            return (sized.alone(self.pointers(x="x_ptr", y="y_ptr")),)
        gathered = scratch_arg(_GATHERED, "*fp32")
        [x, y] = self.pointers(x="x_ptr", y="y_ptr")
        return sized.alone((x, gathered)), sized.rendered(_LINES, (gathered, y, self.count), target)

    def _sized(self, shape: Shape, limits: Limits) -> CollectiveKernel:
        return replace(self, tokens=min(shape.max_tokens, limits.max_step_tokens))

    def kernel(self, target: Target, exchange: Exchange | None) -> LaunchSpec:
        """The launch through memory that all ranks see. exchange: the communicator's operation that may replace it;
        None if none may."""
        return replace(self.rendered(self.template, self.args, target), exchange=exchange)

    def rendered(self, template: str, args: tuple[Arg, ...], target: Target) -> LaunchSpec:
        """The launch of a template's kernel with these arguments."""
        source = render(template, replace(self, arguments=args), self.step)
        warps = max(self.block // _PER_THREAD // target.warp_size, 1)
        return LaunchSpec(source, self.entry, args, (Extent(self.programs), ONE, ONE), num_warps=warps)

    def exchange_of(self, target: Target) -> Exchange | None:
        """The communicator's operation, if it is faster; else None. Also None for a gather, because a communicator does
        not give the order that ranks' lines need."""
        nbytes = 4 * self.tokens * self.elements
        ranks = self.step.ranks
        faster = ring_seconds(nbytes, ranks, target) < one_shot_seconds(nbytes, ranks, target)
        return self._exchange() if faster and not self.gathers else None

    def alone(self, args: tuple[Arg, ...]) -> LaunchSpec:
        """The launch of a communicator, if ranks do not see each other's memory."""
        return LaunchSpec("", self.entry, args, (ONE, ONE, ONE), exchange=self._exchange(only=True))

    def _exchange(self, only: bool = False) -> Exchange:
        return Exchange(self.step.op, extent(self.num_rows, times=self.elements), only)
