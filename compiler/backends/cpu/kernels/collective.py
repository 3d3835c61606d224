"""Collective operations of ranks: processes of one machine that share memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from .....runtime.format.operands import OutputOperand
from ....program.steps.collective import AllGather, AllReduce, Collective, GatherRows, ReduceScatter, Transfer
from .base import KernelParams, ctype

C = TypeVar("C", bound=Collective)


@dataclass(frozen=True)
class CollectiveParams(KernelParams[C]):
    """Parameters that all collectives share."""

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
    """A sum over ranks; each rank gets its own rows of it."""

    template: ClassVar[str] = "cpp/collective/reduce_scatter.cpp.jinja"
    headers: ClassVar[tuple[str, ...]] = ("ranks.h", "rank_rows.h")


@dataclass(frozen=True)
class GatherRowsParams(CollectiveParams[GatherRows]):
    """Each rank gets the rows of all ranks."""

    template: ClassVar[str] = "cpp/collective/gather_rows.cpp.jinja"
    headers: ClassVar[tuple[str, ...]] = ("ranks.h", "rank_rows.h")


@dataclass(frozen=True)
class AllGatherParams(CollectiveParams[AllGather]):
    """The ranks' values, concatenated."""

    template: ClassVar[str] = "cpp/collective/all_gather.cpp.jinja"

    @property
    def first_only(self) -> bool:
        """Whether only rank 0 needs the result, because it samples for all ranks."""
        return isinstance(self.step.y, OutputOperand)

    @property
    def merges(self) -> bool:
        """Whether ranks can exchange the largest value of a row instead of the row."""
        return self.first_only and self.step.outer == 1


@dataclass(frozen=True)
class TransferParams(CollectiveParams[Transfer]):
    """Values that one pipeline stage passes to the next."""

    template: ClassVar[str] = "cpp/collective/transfer.cpp.jinja"
    headers: ClassVar[tuple[str, ...]] = ("ranks.h", "stages.h")

    @classmethod
    def refusal(cls, step: Transfer) -> str:
        return "" if step.x.dtype == step.y.dtype else f"{step.x.dtype} does not become {step.y.dtype} on the way"
