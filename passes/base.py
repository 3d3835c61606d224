"""The base class of passes. The manager, not the pass, verifies, times, dumps and reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ..compiler.graph.graph import Graph
from .allocation import Allocation
from .quantized import QuantRecord

NO_FACTS: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Refusal:
    """Why a rule did not fire at a place where its pattern nearly or fully matched."""

    rule: str
    node: str
    reason: str


@dataclass
class PassContext:
    """What passes may use besides the graph: lists for refusals and quantization records, and a progress callback.

    The callback takes (text, done, total). allocation: the choice of --quant auto, None before it. calibrations: a
    folder in which each pass stores its calibration results; None: they are not stored.
    """

    refusals: list[Refusal] = field(default_factory=list)
    progress: Callable[[str, int, int], None] = lambda text, done, total: None
    quant_records: list[QuantRecord] = field(default_factory=list)
    allocation: Allocation | None = None
    calibrations: Path | None = None


@dataclass
class PassResult:
    """Whether the graph changed, and how often each rewrite was applied."""

    modified: bool
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Pass(ABC):
    """One transformation of a graph. Its dataclass fields are its options.

    `requires`: facts (graph/facts.py) without which the pass is wrong or less effective. `ensures`: facts that are true
    afterwards. `breaks`: facts that may no longer be true afterwards; all other facts are kept. `tolerance` bounds max
    |after - before| / max |before| of the logits in the reference interpreter, float32; None means that the pass
    changes numbers on purpose (quantization).
    """

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = NO_FACTS
    ensures: ClassVar[frozenset[str]] = NO_FACTS
    breaks: ClassVar[frozenset[str]] = NO_FACTS
    tolerance: ClassVar[float | None] = 1e-5

    @abstractmethod
    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        """Transform the graph in place."""
