"""Writer: the state while a graph is written as ONNX; and the table of handlers of ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import fx

from ..graph.graph import Graph
from ..handlers import HandlerTable
from .attention import Sequences
from .builder import Builder
from .weights import Weights


@dataclass
class Writer:
    """The state while a graph is written. values: the ONNX value of each node, or a list of values."""

    graph: Graph
    b: Builder
    weights: Weights
    sequences: Sequences
    values: dict[fx.Node, Any] = field(default_factory=dict)

    def value(self, arg: Any) -> str:
        """The ONNX value of an operand; "" for a missing one."""
        if arg is None:
            return ""
        if arg.op == "get_attr":
            return self.weights.value(self.graph.weight(arg), str(arg.target))
        return self.values[arg]

    def rows_of(self, arg: fx.Node, index: str) -> str:
        """arg[index] along the first axis; for a weight only these rows are decoded."""
        if arg.op == "get_attr":
            return self.weights.rows(self.graph.weight(arg), str(arg.target), index)
        return self.b.add("Gather", self.value(arg), index, axis=0)


Handler: TypeAlias = Callable[[Writer, fx.Node], Any]
Table: TypeAlias = HandlerTable[Handler]  # by the name of an op of the dialect or of ATen
