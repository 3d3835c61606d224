"""The base of all CPU kernels: a step with the name of its C++ function, rendered for one ISA level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from .....runtime.format.operands import Operand
from ....program.steps.base import Step
from ...render import render
from ..isa import Isa
from ..layouts.elements import C_TYPES

S = TypeVar("S", bound=Step)


@dataclass(frozen=True)
class KernelParams(Generic[S]):
    """The kernel of a step; its template gets the step as `s` and these parameters as `p`.

    `c.input<T>(i)` in C++ is the step's input number i (see `Step.inputs`), `c.output<T>(i)` its output number i.
    """

    template: ClassVar[str]
    headers: ClassVar[tuple[str, ...]] = ()  # that the kernel needs in addition to those of every library
    step: S
    fn: str
    isa: Isa

    @classmethod
    def refusal(cls, step: S) -> str:
        """Why the kernel cannot be made for a step of its op; "" if it can."""
        return next((f"unknown dtype {o.dtype!r}" for o in step.operands.values() if o.dtype not in KNOWN), "")

    @property
    def row_count(self) -> str:
        """C++ expression for the number of rows."""
        return "c.logit_rows()" if self.step.rows == "logit_rows" else "c.tokens()"

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that each thread needs; 0 for none."""
        return 0

    @property
    def partials(self) -> tuple[int, int]:
        """(a, b): a step of one token needs `b` bytes of shared scratch memory for each of `a` parts of a sequence and
        each segment of its context."""
        return 0, 0

    @property
    def shared_bytes(self) -> int:
        """Bytes of scratch memory that all threads share; 0 for none."""
        return 0

    def source(self) -> str:
        """The C++ function `static void <fn>(const Ctx& c)`, and what it needs in addition to the shared headers."""
        return render(self.template, self, self.step)


KNOWN = {*C_TYPES, "u8"}


def ctype(operand: Operand) -> str:
    """The C++ element type of an operand."""
    return C_TYPES[operand.dtype]
