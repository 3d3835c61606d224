"""What ranks do together: processes of one machine, in memory that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from .....runtime.format.operands import OutputOperand
from ....program.steps.collective import AllGather, AllReduce, Collective, GatherRows, ReduceScatter, Transfer
from .base import KernelParams, ctype

C = TypeVar("C", bound=Collective)


@dataclass(frozen=True)
class CollectiveParams(KernelParams[C]):
    """Common to them."""

    headers: ClassVar[tuple[str, ...]] = ("ranks.h",)

    @property
    def ctype(self) -> str:
        """The C++ element type of x and y."""
        return ctype(self.step.x)

    @classmethod
    def refusal(cls, step: C) -> str:
        """Why the kernel cannot be made; "" if it can."""
        return "" if step.x.dtype == step.y.dtype == "f32" else "ranks exchange float32 only"


@dataclass(frozen=True)
class AllReduceParams(CollectiveParams[AllReduce]):
    """A sum over ranks."""

    template: ClassVar[str] = "cpp/collective/all_reduce.cpp.jinja"


@dataclass(frozen=True)
class ReduceScatterParams(CollectiveParams[ReduceScatter]):
    """A sum over ranks, of which each has its own rows."""

    template: ClassVar[str] = "cpp/collective/reduce_scatter.cpp.jinja"
    headers: ClassVar[tuple[str, ...]] = ("ranks.h", "rank_rows.h")


@dataclass(frozen=True)
class GatherRowsParams(CollectiveParams[GatherRows]):
    """The rows of all ranks."""

    template: ClassVar[str] = "cpp/collective/gather_rows.cpp.jinja"
    headers: ClassVar[tuple[str, ...]] = ("ranks.h", "rank_rows.h")


@dataclass(frozen=True)
class AllGatherParams(CollectiveParams[AllGather]):
    """What ranks have, one behind the other."""

    template: ClassVar[str] = "cpp/collective/all_gather.cpp.jinja"

    @property
    def first_only(self) -> bool:
        """Whether rank 0 alone wants the result: it samples for all."""
        return isinstance(self.step.y, OutputOperand)

    @property
    def merges(self) -> bool:
        """Whether ranks can give the largest of a row in place of the row."""
        return self.first_only and self.step.outer == 1


@dataclass(frozen=True)
class TransferParams(CollectiveParams[Transfer]):
    """What one stage gives the next."""

    template: ClassVar[str] = "cpp/collective/transfer.cpp.jinja"
    headers: ClassVar[tuple[str, ...]] = ("ranks.h", "stages.h")

    @classmethod
    def refusal(cls, step: Transfer) -> str:
        return "" if step.x.dtype == step.y.dtype else f"{step.x.dtype} does not become {step.y.dtype} on the way"
