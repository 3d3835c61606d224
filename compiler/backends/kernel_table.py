"""Which kernel of a back end implements each op: a table that other packages may add to."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from ..program.steps.base import Step, op_name
from .errors import CodegenError


class KernelClass(Protocol):
    """A kernel class that a table can hold."""

    @classmethod
    def refusal(cls, step: Any) -> str:
        """Why the kernel cannot be made for a step of its op; "" if it can."""
        ...


K = TypeVar("K", bound=type[KernelClass])


class KernelTable(Generic[K]):
    """The kernel class of each op, for one back end (which errors name)."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._classes: dict[str, K] = {}

    def register(self, step: type[Step], kernel: K) -> None:
        """Add the kernel class of an op; ValueError if it has one."""
        if self._classes.setdefault(op_name(step), kernel) is not kernel:
            raise ValueError(f"the {self.backend} backend has a kernel of op {op_name(step)!r} already")

    def ops(self) -> list[str]:
        """The ops that have a kernel."""
        return sorted(self._classes)

    def refusal(self, step: Step) -> str:
        """Why this back end has no kernel for a step; "" if it has one."""
        found = self._classes.get(step.op)
        if found is None:
            return f"the {self.backend} backend has no kernel of op {step.op!r}"
        return step.problem() or found.refusal(step)

    def find(self, step: Step) -> K:
        """The kernel class of a step; CodegenError naming its kernel, its op and the reason if there is none."""
        reason = self.refusal(step)
        if reason:
            raise CodegenError(f"kernel {step.kernel} ({step.op}): {reason}")
        return self._classes[step.op]
