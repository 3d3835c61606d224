"""Step rewrites: passes over the steps of a program, which run in order before its memory is planned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from .builder import ProgramBuilder
from .profile import Profile


@dataclass(frozen=True)
class StepRewrite(ABC):
    """One transformation of the records of a program under construction. A second run must find nothing to do."""

    name: ClassVar[str]

    @abstractmethod
    def applies(self, profile: Profile) -> bool:
        """Whether the back end has kernels for the result."""

    @abstractmethod
    def run(self, builder: ProgramBuilder, profile: Profile) -> int:
        """Rewrite `builder.records` in place; returns how many steps were rewritten."""
