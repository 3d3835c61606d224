"""Values that are known while a model is traced: sizes, axes, and results computed from them.

ONNX computes shapes with tensors, Shape -> Gather -> Concat -> Reshape. Here such a value is an array of Python numbers
and of torch's symbolic sizes, so that the trace has a reshape to [1, T, 4, 16] and not the ops that computed this
shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ....weights.handles import Weight
from .errors import Refused

SMALL = 64  # most elements of an integer constant whose values are read


@dataclass(frozen=True)
class Known:
    """An array of numbers, of any shape. dtype: that of the tensor it stands for. tensor: this tensor if it is a
    constant; else None."""

    array: np.ndarray  # dtype object
    dtype: torch.dtype
    tensor: Tensor | None = None

    @staticmethod
    def of(value: Any, dtype: torch.dtype = torch.int64) -> Known:
        """A known value of a number or a list of numbers."""
        if isinstance(value, (list, tuple)):
            array = np.empty(len(value), dtype=object)
            for i, item in enumerate(value):
                array[i] = item
            return Known(array, dtype)
        array = np.empty((), dtype=object)
        array[()] = value
        return Known(array, dtype)

    @property
    def is_one(self) -> bool:
        """Whether there is exactly one element."""
        return self.array.size == 1

    def item(self) -> Any:
        """The only element."""
        return self.array.reshape(-1)[0]

    def items(self) -> list[Any]:
        """The elements in order."""
        return list(self.array.reshape(-1))

    def ints(self) -> list[Any]:
        """The elements as sizes or axes."""
        return [int(v) if isinstance(v, (bool, float)) else v for v in self.items()]

    def as_tensor(self, device: torch.device) -> Tensor:
        """`tensor`, or a new tensor of the array's shape."""
        if self.tensor is not None:
            return self.tensor
        parts = [torch.full((), v, dtype=self.dtype, device=device) for v in self.items()]
        if self.array.ndim == 0:
            return parts[0]
        if not parts:
            return torch.empty(self.array.shape, dtype=self.dtype, device=device)
        return torch.stack(parts).reshape(self.array.shape)


def constant(weight: Weight) -> Known:
    """A small constant of a file as a known value. It is read even during a trace."""
    with _disable_current_modes():
        value = weight.load()
        items = value.reshape(-1).tolist()
    array = np.empty(tuple(value.shape), dtype=object)
    for place, item in zip(np.ndindex(*array.shape), items, strict=True):
        array[place] = item
    return Known(array, torch.float32 if value.is_floating_point() else value.dtype)


def _divided(a: Any, b: Any) -> Any:
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    return a // b if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt) or (a < 0) == (b < 0) else -(-a // b)


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": _divided,
    "Mod": lambda a, b: a % b,
    "Pow": lambda a, b: a**b,
    "Max": lambda a, b: a if a >= b else b,
    "Min": lambda a, b: a if a <= b else b,
    "And": lambda a, b: bool(a) and bool(b),
    "Or": lambda a, b: bool(a) or bool(b),
    "Equal": lambda a, b: bool(a == b),
    "Less": lambda a, b: bool(a < b),
    "LessOrEqual": lambda a, b: bool(a <= b),
    "Greater": lambda a, b: bool(a > b),
    "GreaterOrEqual": lambda a, b: bool(a >= b),
}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "Neg": lambda a: -a,
    "Abs": lambda a: a if isinstance(a, torch.SymInt) else abs(a),
    "Not": lambda a: not a,
    "Sqrt": lambda a: float(a) ** 0.5,
    "Reciprocal": lambda a: 1.0 / a,
    "Floor": lambda a: a if isinstance(a, torch.SymInt) else float(np.floor(a)),
    "Ceil": lambda a: a if isinstance(a, torch.SymInt) else float(np.ceil(a)),
    "Log": lambda a: float(np.log(a)),
    "Exp": lambda a: float(np.exp(a)),
}
_LOGICAL = {"And", "Or", "Not", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}


def computes(op: str) -> bool:
    """Whether `elementwise` can compute an op, given its ONNX name."""
    return op in _BINARY or op in _UNARY


def elementwise(op: str, *operands: Known) -> Known:
    """An elementwise op over known values."""
    dtype = torch.bool if op in _LOGICAL else operands[0].dtype
    if op in _UNARY:
        return _mapped(_UNARY[op], dtype, operands[0])
    result = operands[0]
    for other in operands[1:]:
        result = _mapped(_BINARY[op], dtype, result, other)
    return result if len(operands) > 1 else Known(result.array, dtype)


def where(condition: Known, a: Known, b: Known) -> Known:
    """Elements of `a` where the condition holds, else of `b`; they broadcast."""
    return _mapped(lambda c, x, y: x if c else y, a.dtype, condition, a, b)


def converted(value: Known, dtype: torch.dtype) -> Known:
    """The value in another dtype. Symbolic sizes stay symbolic."""

    def one(item: Any) -> Any:
        if isinstance(item, torch.SymInt):
            return item
        return bool(item) if dtype == torch.bool else float(item) if dtype.is_floating_point else int(item)

    return _mapped(one, dtype, value)


def _mapped(fn: Callable[..., Any], dtype: torch.dtype, *operands: Known) -> Known:
    try:
        arrays = np.broadcast_arrays(*(o.array for o in operands))
    except ValueError as error:
        raise Refused(f"constants whose shapes do not go together: {error}") from error
    array = np.empty(arrays[0].shape, dtype=object)
    for place in np.ndindex(*array.shape):
        try:
            array[place] = fn(*(a[place] for a in arrays))
        except (ZeroDivisionError, OverflowError, ValueError) as error:
            raise Refused(f"arithmetic of constants: {error}") from error
    return Known(array, dtype)
