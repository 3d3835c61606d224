"""Values of the token-major graph: a node, and the logical dims that the export gave it.

The export has logical shapes such as [1, T, H] or [1, heads, T, D]. The graph keeps the token axis first: [T, 1, H],
[T, 1, heads, D]; so each value is followed together with the place of its token axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...graph.tensor_types import type_of


class _TokenAxis:
    def __repr__(self) -> str:
        return "T"


T = _TokenAxis()
Dims = tuple[Any, ...]


@dataclass(frozen=True)
class TracedValue:
    """A canonical node and the logical dims that the export gave it; T marks the token axis.

    If `dims` holds T but the node has no row axis, every token has the same value.
    """

    node: fx.Node
    dims: Dims

    @property
    def axis(self) -> int | None:
        """The logical index of the token axis; None if there is none."""
        return self.dims.index(T) if T in self.dims else None

    @property
    def per_token(self) -> bool:
        """Whether the canonical node has a row axis."""
        return type_of(self.node).rows is not None

    @property
    def features(self) -> tuple[int, ...]:
        """Logical dims without the token axis: the canonical per-row shape."""
        return tuple(d for d in self.dims if d is not T)

    def canonical(self, logical_axis: int) -> int:
        """Index in the canonical tensor of a logical axis other than the token axis."""
        logical_axis %= len(self.dims)
        before = sum(1 for d in self.dims[:logical_axis] if d is not T)
        return before + (1 if self.per_token else 0)


def dims_of(val: Any) -> Dims:
    """The logical dims of an exported value. ValueError if a size mixes tokens with something else.

    An axis of n * tokens elements, tokens merged with the axis after them, is two dims here: T and n. See `is_merged`.
    """
    dims: list[Any] = []
    for size in val.shape:
        if isinstance(size, torch.SymInt):
            count, symbol = size.node.expr.as_coeff_Mul()
            if symbol.is_Symbol and count.is_Integer:
                dims += [T] if count == 1 else [T, int(count)]
            elif size.node.expr.is_Integer:
                dims.append(int(size.node.expr))
            else:
                raise ValueError(f"a tensor of size {size.node.expr}")
        else:
            dims.append(int(size))
    if dims.count(T) > 1:
        raise ValueError("a tensor over pairs of tokens")
    return tuple(dims)


def is_merged(value: Any, val: Any) -> bool:
    """Whether the export merges the token axis of a value with another axis, and so numbers its axes differently."""
    return isinstance(value, TracedValue) and isinstance(val, torch.Tensor) and val.dim() != len(value.dims)


@dataclass(frozen=True)
class Longer:
    """The result of a padded convolution: `value` for the tokens, followed by surplus rows that a slice must remove."""

    value: TracedValue


@dataclass(frozen=True)
class Padded:
    """`value` with `before` rows before the first token. fill: these rows' values, one per channel; None: zeros."""

    value: TracedValue
    before: int
    fill: TracedValue | None = None


@dataclass(frozen=True)
class KeyPairs:
    """`value` of the keys, repeated for every query along an axis of size 1: a value over pairs of tokens."""

    value: TracedValue


@dataclass(frozen=True)
class Shorter:
    """`value` without its last token, which only a shift can use."""

    value: TracedValue


def op_name(target: Any) -> str:
    """The name of an exported call without its overload: aten.view for aten::view.default. For a plain function, its
    own name."""
    if not hasattr(target, "_schema"):
        return str(getattr(target, "__name__", target))
    return str(target._schema.name).replace("::", ".")


class Unrepresentable:
    """A value that has no token-major form. It is an error only if a node that is kept uses it."""

    def __init__(self, reason: str, node: fx.Node) -> None:
        self.reason = reason
        self.node = node


def first_unrepresentable(values: list[Any]) -> Unrepresentable | None:
    """The first operand that is Unrepresentable, also inside lists; None if there is none."""
    for value in values:
        if isinstance(value, Unrepresentable):
            return value
        if isinstance(value, list):
            found = first_unrepresentable(value)
            if found is not None:
                return found
    return None


def module_path(node: fx.Node) -> str:
    """The module that a node comes from, such as model.layers.0.self_attn.q_proj; "" if it is not known."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [value[0] for value in stack.values() if isinstance(value, tuple)]
    return paths[-1].removeprefix("model.") if paths and paths[-1] != "model" else ""
