"""TensorType: the type of a graph's value, per row, and its inference by running an op on meta tensors."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...runtime.format.batch import BatchArray
from ..errors import ExtensionError
from ..ops import traits_of
from ..weights.formats.dense import short_dtype
from ..weights.handles import Weight

TOKENS = "tokens"
LOGIT_ROWS = "logit_rows"
DRAFT_ROWS = "draft_rows"  # the logit rows of a step for which a section runs
# Row counts used when types are inferred by running an op on meta tensors. Any sizes work, as ops are row-wise.
_ROW_SAMPLE = {TOKENS: 7, LOGIT_ROWS: 3, DRAFT_ROWS: 2}


@dataclass(frozen=True)
class TensorType:
    """dtype and per-row shape of a value; `rows` is None for constants, which have no row axis."""

    rows: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        """Number of axes of the tensor, the row axis included."""
        return len(self.shape) + (self.rows is not None)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape with -1 for the row axis."""
        return self.shape if self.rows is None else (-1, *self.shape)

    def meta(self) -> torch.Tensor:
        """A meta tensor of this type, with shape `shape`, preceded by a sample row count if it has rows."""
        lead = () if self.rows is None else (_ROW_SAMPLE[self.rows],)
        return torch.empty((*lead, *self.shape), dtype=self.dtype, device="meta")

    def __str__(self) -> str:
        lead = {TOKENS: ["T"], LOGIT_ROWS: ["L"], DRAFT_ROWS: ["D"], None: []}[self.rows]
        return f"{short_dtype(self.dtype)}[{', '.join(lead + [str(s) for s in self.shape])}]"


def input_type(array: BatchArray) -> TensorType:
    """The type of a declared input in the graph: numbers compute in float32 or int64, however they are stored."""
    rows = DRAFT_ROWS if array.is_asked else TOKENS
    return TensorType(rows, array.row_shape, torch.float32 if "f" in array.dtype else torch.int64)


# The inputs that every program may have, and the types of their placeholders.
FIXED_INPUTS = {
    "token_ids": TensorType(TOKENS, (), torch.int64),
    "positions": TensorType(TOKENS, (), torch.int64),
    LOGIT_ROWS: TensorType(LOGIT_ROWS, (), torch.int64),
    DRAFT_ROWS: TensorType(DRAFT_ROWS, (), torch.int64),
}


def weight_type(weight: Weight) -> TensorType:
    """The type of a weight in the graph: floats compute in float32, however they are stored."""
    return TensorType(None, weight.shape, torch.float32 if weight.dtype.is_floating_point else weight.dtype)


def type_of(node: fx.Node) -> TensorType:
    """The single tensor type of a node."""
    found = node.meta["type"]
    assert isinstance(found, TensorType), f"{node} has several results"
    return found


def _rows_of(node: fx.Node) -> str | None:
    if traits_of(node.target).selects_rows:
        return _types(node.args[1])[0].rows  # type: ignore[arg-type]
    rows = {t.rows for arg in node.all_input_nodes for t in _types(arg)} - {None}
    assert len(rows) <= 1, f"{node} mixes token rows and logit rows"
    return rows.pop() if rows else None


def _types(node: fx.Node) -> tuple[TensorType, ...]:
    found = node.meta["type"]
    return found if isinstance(found, tuple) else (found,)


def infer_type(node: fx.Node) -> TensorType | tuple[TensorType, ...]:
    """The type of a call, found by running its target on meta tensors.

    Raises the target's errors; for an op of another package an ExtensionError.
    """
    if node.target is operator.getitem:
        source, index = node.args
        return source.meta["type"][index]  # type: ignore[union-attr, index]
    call = node.target, _signature(node.args), _signature(node.kwargs)
    if call not in _INFERRED:
        _INFERRED[call] = _infer(node)
    return _INFERRED[call]


# By target and operands: layers repeat, and the verifier asks again after each pass.
_INFERRED: dict[Any, TensorType | tuple[TensorType, ...]] = {}


def _signature(value: Any) -> Any:
    """A key of the properties of operands that a call's type depends on. Equal numbers of different types give
    different keys."""
    if isinstance(value, fx.Node):
        return value.meta["type"]
    if isinstance(value, (list, tuple)):
        return type(value) is tuple, *map(_signature, value)
    if isinstance(value, dict):
        return tuple((name, _signature(v)) for name, v in value.items())
    return type(value), value


def _run_on_meta(target: Any, args: Any, kwargs: Any) -> Any:
    try:
        return target(*args, **kwargs)
    except Exception as error:
        if getattr(target, "namespace", "icc") in ("icc", "aten", "prims"):
            raise
        said = str(error).partition("\n")[0]
        raise ExtensionError(f"{target} fails on tensors that have shapes and no values: {said}") from error


def _infer(node: fx.Node) -> TensorType | tuple[TensorType, ...]:
    args = fx.map_arg(node.args, lambda n: n.meta["type"].meta())
    result = _run_on_meta(node.target, args, node.kwargs)
    rows = _rows_of(node)

    def strip(value: torch.Tensor) -> TensorType:
        shape = tuple(value.shape)
        if rows is None:
            return TensorType(None, shape, value.dtype)
        assert shape and shape[0] == _ROW_SAMPLE[rows], f"{node.target} lost the row axis: {shape}"
        return TensorType(rows, shape[1:], value.dtype)

    return tuple(strip(v) for v in result) if isinstance(result, (tuple, list)) else strip(result)
