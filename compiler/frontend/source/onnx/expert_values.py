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
    """Which slot of which token picked which expert, as numbers: index[T, S], of `count` experts."""

    index: Tensor
    count: int


@dataclass(frozen=True)
class ExpertMarks:
    """1 where a slot of a token picked an expert, else 0, with these axes; of one expert where there is no axis of
    experts."""

    picks: Picks
    axes: tuple[str, ...]
    expert: int = -1


@dataclass(frozen=True)
class ExpertPlaces:
    """Where marks of one expert are: [axes, N], or [N, axes] if `turned`."""

    marks: ExpertMarks
    turned: bool = False


@dataclass(frozen=True)
class ExpertPlace:
    """token times the number of the token plus slot times that of the slot, of each place."""

    marks: ExpertMarks
    token: int = 0
    slot: int = 0


@dataclass(frozen=True)
class Taken:
    """For each place its token's row of x[T, K], or, of weights[T, S], its token's and slot's. root: the name of the
    value that x is another shape of."""

    value: Tensor
    expert: int
    root: str
    weights: bool = False


@dataclass(frozen=True)
class Noted:
    """A call one of whose operands is of places; which of its results, and how wide that is."""

    call: OnnxCall
    expert: int
    result: int
    width: int


@dataclass(frozen=True)
class Added:
    """What experts computed, added up for each token."""

    picks: Picks
    terms: tuple[Noted, ...]


class _Number:
    """How many places there are, which nothing may compute with."""


NUMBER = _Number()
OF_PLACES = (Taken, Noted)
Handlers = Mapping[str, Callable[[OnnxCall], Any]]


def row_handler(c: OnnxCall, handlers: Handlers) -> Callable[[OnnxCall], Any]:
    """Of an op that computes row by row, and says which axis it splits, if any."""
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
