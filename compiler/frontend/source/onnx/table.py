"""The table of handlers, which run ONNX ops; each module of handlers has a part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from onnx import NodeProto
from torch import Tensor

from ....handlers import HandlerTable
from .errors import Refused
from .known import Known


@dataclass(frozen=True)
class OnnxCall:
    """A call of a node.

    inputs: a Tensor, a Known, or None for a missing one. weights: for each input, whether it is a constant.
    """

    node: NodeProto
    attributes: Mapping[str, Any]
    inputs: list[Any]
    device: torch.device
    weights: list[bool]
    makers: Mapping[str, OnnxCall]

    def maker(self, index: int, op: str) -> OnnxCall | None:
        """The call that computed an operand, if its op is `op`; else None."""
        found = self.makers.get(self.node.input[index])
        return found if found is not None and found.node.op_type == op else None

    def is_input(self, index: int) -> bool:
        """Whether an operand is an input of the model."""
        return self.node.input[index] not in self.makers and not self.weights[index]

    def given(self, index: int) -> Any:
        """An operand; None if it is missing."""
        return self.inputs[index] if index < len(self.inputs) else None

    def tensor(self, index: int) -> Tensor:
        """An operand, of any shape, as a tensor; Refused if it is missing."""
        return self.as_tensor(self.given(index))

    def as_tensor(self, value: Any) -> Tensor:
        """A value, of any shape, as a tensor; Refused if it is neither a tensor nor known."""
        if isinstance(value, Tensor):
            return value
        if isinstance(value, Known):
            return value.as_tensor(self.device)
        raise Refused("an operand is missing")

    def known(self, index: int, default: Any = None) -> Known:
        """An operand that must be known while tracing; `default` if it is missing. Refused if it is a tensor."""
        value = self.given(index)
        if value is None and default is not None:
            return Known.of(default)
        if not isinstance(value, Known):
            raise Refused(f"operand {index} depends on the tokens")
        return value

    def attribute(self, name: str, default: Any) -> Any:
        """An attribute of the node, `default` if it has none. Text is returned as str."""
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def axes(self, index: int, name: str = "axes") -> list[int] | None:
        """Axes: the operand `index` in newer opsets, the attribute `name` in older ones; None if neither exists."""
        if self.given(index) is not None:
            return [int(v) for v in self.known(index).ints()]
        found = self.attributes.get(name)
        return None if found is None else list(found)

    @property
    def all_known(self) -> bool:
        """Whether every operand is known."""
        return bool(self.inputs) and all(isinstance(value, Known) for value in self.inputs)


Handler: TypeAlias = Callable[[OnnxCall], Any]
Table: TypeAlias = HandlerTable[Handler]  # by the op's name, with its domain if that is not ONNX's own
