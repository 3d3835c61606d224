"""Symbolic values while a loop over experts runs: which token selected which expert, and what each expert computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from . import elementwise_ops
from .errors import Refused
from .table import OnnxCall

TOKEN, SLOT, EXPERT = "token", "slot", "expert"
SAME = ("Cast", "Identity", "Expand", "Reshape", "Unsqueeze", "Squeeze", "Dropout")
PRODUCTS = ("MatMul", "Gemm", "Linear", "MatMulNBits")
FORM = "experts of a form that icc does not know"


@dataclass(frozen=True)
class Picks:
    """index[T, S]: the expert, of `count`, that each slot of each token selected."""

    index: Tensor
    count: int


@dataclass(frozen=True)
class ExpertMarks:
    """A tensor with the axes `axes`: 1 where a slot of a token selected an expert, else 0. expert: the one that the
    marks belong to, if there is no axis of experts."""

    picks: Picks
    axes: tuple[str, ...]
    expert: int = -1


@dataclass(frozen=True)
class ExpertPlaces:
    """The indices where the marks of one expert are 1: [axes, N], or [N, axes] if `turned` (transposed)."""

    marks: ExpertMarks
    turned: bool = False


@dataclass(frozen=True)
class ExpertPlace:
    """For each index of an expert's marks: `token` times its token's number plus `slot` times its slot's number."""

    marks: ExpertMarks
    token: int = 0
    slot: int = 0


@dataclass(frozen=True)
class Taken:
    """The rows of x[T, K] at an expert's tokens, or, with `weights`, the elements of weights[T, S] at its tokens and
    slots.

    root: the name of the value of which x is a reshape.
    """

    value: Tensor
    expert: int
    root: str
    weights: bool = False


@dataclass(frozen=True)
class Noted:
    """A recorded call on an expert's rows, which runs later. result: the number of this result; width: its width."""

    call: OnnxCall
    expert: int
    result: int
    width: int


@dataclass(frozen=True)
class Added:
    """The sum over experts, for each token, of the results `terms`."""

    picks: Picks
    terms: tuple[Noted, ...]


class _Number:
    """The number of an expert's rows, with which nothing may compute."""


NUMBER = _Number()
OF_PLACES = (Taken, Noted)
Handlers = Mapping[str, Callable[[OnnxCall], Any]]


def row_handler(c: OnnxCall, handlers: Handlers) -> Callable[[OnnxCall], Any]:
    """The handler of an op that computes each row alone. Refused for any other op, and for a split along another axis
    than the last."""
    op = c.node.op_type
    name = op if c.node.domain in ("", "ai.onnx") else f"{c.node.domain}.{op}"
    if op == "Split":
        by_row = c.attribute("axis", 0) in (1, -1)
    elif op == "Slice":
        by_row = c.axes(3) in ([1], [-1])
    else:
        by_row = name in elementwise_ops.HANDLERS or op in PRODUCTS
    handler = handlers.get(name)
    if handler is None or not by_row:
        raise Refused(f"{name} inside of experts")
    return handler
