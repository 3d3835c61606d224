"""What is known of experts while a loop over them runs: which token picked which, and what each computes of its own."""

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
    """index[T, S]: the expert that each slot of each token picked, of `count` experts."""

    index: Tensor
    count: int


@dataclass(frozen=True)
class ExpertMarks:
    """1 where a slot of a token picked an expert, else 0, with the axes `axes`. Without an axis of experts the marks
    are those of one expert."""

    picks: Picks
    axes: tuple[str, ...]
    expert: int = -1


@dataclass(frozen=True)
class ExpertPlaces:
    """The indices where the marks of one expert are 1: [axes, N], or [N, axes] if `turned`."""

    marks: ExpertMarks
    turned: bool = False


@dataclass(frozen=True)
class ExpertPlace:
    """For each place of an expert's marks: `token` times the number of its token plus `slot` times that of its slot."""

    marks: ExpertMarks
    token: int = 0
    slot: int = 0


@dataclass(frozen=True)
class Taken:
    """The rows of x[T, K] at the tokens of each place, or the elements of weights[T, S] at its token and slot.

    root: the name of the value that x is another shape of.
    """

    value: Tensor
    expert: int
    root: str
    weights: bool = False


@dataclass(frozen=True)
class Noted:
    """A call with an operand of places, which runs later: which of its results this is, and how wide that is."""

    call: OnnxCall
    expert: int
    result: int
    width: int


@dataclass(frozen=True)
class Added:
    """The sum, for each token, of what experts computed."""

    picks: Picks
    terms: tuple[Noted, ...]


class _Number:
    """How many places there are, which nothing may compute with."""


NUMBER = _Number()
OF_PLACES = (Taken, Noted)
Handlers = Mapping[str, Callable[[OnnxCall], Any]]


def row_handler(c: OnnxCall, handlers: Handlers) -> Callable[[OnnxCall], Any]:
    """The handler of an op that computes row by row. Refused for any other op, and for a split along another axis than
    the last."""
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
