"""Experts as TorchScript exports a loop over them: for each, NonZero finds its tokens, which are gathered, computed
with its matrices, weighed, and added up where they came from.

Which tokens these are depends on values. So what is computed of them is noted for each expert (`Noted`), and what is
added up is one product with the experts that each token picked, where all experts compute the same with matrices of
their own. Of places in the routing only how they are made is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import elementwise_ops
from .errors import Refused
from .known import Known
from .table import Call

_TOKEN, _SLOT, _EXPERT = "token", "slot", "expert"
_SAME = ("Cast", "Identity", "Expand", "Reshape", "Unsqueeze", "Squeeze", "Dropout")
_PRODUCTS = ("MatMul", "Gemm", "Linear", "MatMulNBits")
_FORM = "experts of a form that icc does not know"


@dataclass(frozen=True)
class Picks:
    """Which slot of which token picked which expert, as numbers: index[T, S], of `count` experts."""

    index: Tensor
    count: int


@dataclass(frozen=True)
class Marks:
    """1 where a slot of a token picked an expert, else 0, with these axes; of one expert where there is no axis of
    experts."""

    picks: Picks
    axes: tuple[str, ...]
    expert: int = -1


@dataclass(frozen=True)
class Places:
    """Where marks of one expert are: [axes, N], or [N, axes] if `turned`."""

    marks: Marks
    turned: bool = False


@dataclass(frozen=True)
class Place:
    """token times the number of the token plus slot times that of the slot, of each place."""

    marks: Marks
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

    call: Call
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


_NUMBER = _Number()
_OF_PLACES = (Taken, Noted)
VALUES = (Marks, Places, Place, *_OF_PLACES, Added)
Handlers = Mapping[str, Callable[[Call], Any]]


def one_hot(c: Call) -> Marks:
    """Marks of picked experts, index[T, S]."""
    index, count, values = c.tensor(0), c.known(1), c.known(2)
    if index.dim() != 2 or values.items() != [0, 1] or c.attribute("axis", -1) not in (-1, 2) or not count.is_one:
        raise Refused("marks of another form than those of picked experts")
    return Marks(Picks(index, int(count.item())), (_TOKEN, _SLOT, _EXPERT))


def follow(c: Call, handlers: Handlers) -> Any:
    """What becomes of a call with such operands. A sum is computed as soon as something else reads it."""
    op = c.node.op_type
    first = c.inputs[0]
    if any(isinstance(value, _OF_PLACES) for value in c.inputs) and op != "ScatterElements":
        return _noted(c, handlers)
    if op == "Add" and (joined := _joined(c)) is not None:
        return joined
    if op in ("Slice", "Shape") and isinstance(first, Added):
        return Known.of([1, 1]) if op == "Shape" else first  # asked for to broadcast against
    if op == "ScatterElements":
        return _scattered(c)
    if any(isinstance(value, Added) for value in c.inputs):
        given = [_computed(value, handlers) if isinstance(value, Added) else value for value in c.inputs]
        whole = replace(c, inputs=given)
        return handlers[op](whole)
    step = _STEPS.get(op)
    if step is None:
        raise Refused(_FORM)
    return step(c)


def _transposed(c: Call) -> Any:
    value = c.inputs[0]
    if isinstance(value, Places):
        return replace(value, turned=not value.turned)
    if isinstance(value, Marks):
        order = c.attribute("perm", list(range(len(value.axes)))[::-1])
        return replace(value, axes=tuple(value.axes[i] for i in order))
    raise Refused(_FORM)


def _gathered(c: Call) -> Any:
    value, index = c.inputs[:2]
    if isinstance(value, Marks) and isinstance(index, Known) and index.is_one:
        axis = c.attribute("axis", 0) % len(value.axes)
        if value.axes[axis] != _EXPERT or not 0 <= int(index.item()) < value.picks.count:
            raise Refused(_FORM)
        kept = value.axes if index.array.ndim else (*value.axes[:axis], *value.axes[axis + 1 :])
        return Marks(value.picks, kept, int(index.item()))
    if isinstance(value, Places) and isinstance(index, Known) and index.is_one:
        return _place(value, int(index.item()))
    if isinstance(index, Place) and isinstance(value, Tensor):
        return _taken(value, index, c.attribute("axis", 0), _root(c))
    raise Refused(_FORM)


def _place(places: Places, row: int) -> Place:
    axis = places.marks.axes[row]
    return Place(places.marks, token=int(axis == _TOKEN), slot=int(axis == _SLOT))


def _root(c: Call) -> str:
    name = c.node.input[0]
    while (made := c.makers.get(name)) is not None and made.node.op_type in (*_SAME, "Flatten"):
        name = made.node.input[0]
    return name


def _taken(value: Tensor, place: Place, axis: int, root: str) -> Taken:
    slots = place.marks.picks.index.shape[1]
    if (place.token, place.slot) == (1, 0) and all(s == 1 for s in (*value.shape[:axis], *value.shape[axis + 1 : -1])):
        return Taken(value.reshape(value.shape[axis], value.shape[-1]), place.marks.expert, root)
    if (place.token, place.slot) == (slots, 1) and axis == 0 and value.dim() <= 2:
        return Taken(value.reshape(-1, slots), place.marks.expert, root, weights=True)
    raise Refused(_FORM)


def _parts(c: Call) -> Any:
    value = c.inputs[0]
    if isinstance(value, Places) and value.turned and c.attribute("axis", 0) % 2 == 1:
        return [_place(value, row) for row in range(len(value.marks.axes))]
    raise Refused(_FORM)


def _nonzero(c: Call) -> Any:
    if isinstance(c.inputs[0], Marks) and _EXPERT not in c.inputs[0].axes:
        return Places(c.inputs[0])
    raise Refused(_FORM)


def _squeezed(c: Call) -> Any:
    value = c.inputs[0]
    if isinstance(value, Marks) and value.expert >= 0:
        return replace(value, axes=tuple(axis for axis in value.axes if axis != _EXPERT))
    return _kept(c)


def _kept(c: Call) -> Any:
    if isinstance(c.inputs[0], (Marks, Place)):
        return c.inputs[0]
    raise Refused(_FORM)


def _arithmetic(c: Call) -> Any:
    a, b = c.inputs
    if isinstance(a, Known):
        a, b = b, a
    if isinstance(a, Place) and isinstance(b, Known) and b.is_one and c.node.op_type == "Mul":
        return replace(a, token=a.token * int(b.item()), slot=a.slot * int(b.item()))
    if isinstance(a, Place) and isinstance(b, Place) and a.marks is b.marks and c.node.op_type == "Add":
        return replace(a, token=a.token + b.token, slot=a.slot + b.slot)
    raise Refused(_FORM)


def _shape(c: Call) -> Known:
    return Known.of([_NUMBER] if isinstance(c.inputs[0], Place) else [_NUMBER] * len(c.inputs[0].axes))


_STEPS: dict[str, Callable[[Call], Any]] = {
    "Transpose": _transposed, "Gather": _gathered, "Split": _parts, "NonZero": _nonzero, "Squeeze": _squeezed,
    "Mul": _arithmetic, "Add": _arithmetic, "Shape": _shape,
    **dict.fromkeys(("Cast", "Identity", "Expand", "Reshape", "Unsqueeze", "Flatten"), _kept),
}  # fmt: skip


def _noted(c: Call, handlers: Handlers) -> Any:
    """What is noted of a call; what leaves values as they are, but for axes of one, leaves nothing."""
    experts, op, first = {v.expert for v in c.inputs if isinstance(v, _OF_PLACES)}, c.node.op_type, c.inputs[0]
    if len(experts) > 1 or any(isinstance(value, Added) for value in c.inputs):
        raise Refused("values of two experts in one")
    if op == "Shape":
        return Known.of([_NUMBER, _width(first)])
    if op in _SAME:
        if not isinstance(first, _OF_PLACES) or (op == "Reshape" and c.known(1).items()[-1] not in (-1, _width(first))):
            raise Refused(_FORM)
        weighs = isinstance(first, Taken) and first.weights
        if op in ("Unsqueeze", "Squeeze") and not weighs and (c.axes(1) or [0]) != [0]:
            raise Refused(_FORM)
        return first
    (expert,) = experts
    with _disable_current_modes():
        sizes = [_as_meta(value) for value in c.inputs]
        found = _handler(c, handlers)(replace(c, inputs=sizes, device=torch.device("meta"), makers={}))
    widths = [int(v.shape[-1]) for v in (found if isinstance(found, (list, tuple)) else [found])]
    return [Noted(c, expert, i, width) for i, width in enumerate(widths)]


def _width(value: Taken | Noted) -> int:
    if isinstance(value, Noted):
        return value.width
    return 1 if value.weights else int(value.value.shape[-1])


def _as_meta(value: Any) -> Any:
    """One row of the size that a value has."""
    if isinstance(value, _OF_PLACES):
        return torch.empty(1, _width(value), device="meta")
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def _handler(c: Call, handlers: Handlers) -> Callable[[Call], Any]:
    """Of an op that computes row by row, and says which axis it splits, if any."""
    op = c.node.op_type
    name = op if c.node.domain in ("", "ai.onnx") else f"{c.node.domain}.{op}"
    if op == "Split":
        by_row = c.attribute("axis", 0) in (1, -1)
    elif op == "Slice":
        by_row = c.axes(3) in ([1], [-1])
    else:
        by_row = name in elementwise_ops.HANDLERS or op in _PRODUCTS
    handler = handlers.get(name)
    if handler is None or not by_row:
        raise Refused(f"{name} inside of experts")
    return handler


def _scattered(c: Call) -> Added:
    """One expert's results, put where they came from among zeros."""
    base, place, values = c.inputs[:3]
    blank = isinstance(base, Added) or _is_zero(c, 0)
    if not (isinstance(place, Place) and isinstance(values, Noted) and blank) or c.attribute("axis", 0) != 0:
        raise Refused(_FORM)
    if (place.token, place.slot) != (1, 0) or values.expert != place.marks.expert:
        raise Refused("results of experts put elsewhere than they came from")
    if isinstance(base, Added):
        if c.attribute("reduction", "none") != "add" or base.picks is not place.marks.picks:
            raise Refused(_FORM)
        return Added(base.picks, (*base.terms, values))
    return Added(place.marks.picks, (values,))


def _joined(c: Call) -> Added | None:
    """A sum with what other experts added, or with zeros."""
    a, b = c.inputs
    if isinstance(a, Added) and isinstance(b, Added) and a.picks is b.picks:
        return Added(a.picks, (*a.terms, *b.terms))
    for number, (value, other) in enumerate(((a, b), (b, a))):
        if isinstance(value, Added) and not isinstance(other, Added) and _is_zero(c, 1 - number):
            return value
    return None


def _is_zero(c: Call, index: int) -> bool:
    made = c.maker(index, "ConstantOfShape")
    if made is None:
        return False
    proto = made.attributes.get("value")
    return proto is None or (not any(proto.raw_data) and not any(proto.float_data))


def _computed(added: Added, handlers: Handlers) -> Tensor:
    """[T, H]: each token's picked experts, added up."""
    terms = sorted(added.terms, key=lambda term: term.expert)
    if [term.expert for term in terms] != list(range(added.picks.count)):
        raise Refused(f"{len(terms)} of {added.picks.count} experts")
    return _Stacked(added.picks.index, handlers).of(terms).sum(1)


class _Stacked:
    """What all experts compute alike, [T, S, N] of each token and slot."""

    def __init__(self, index: Tensor, handlers: Handlers) -> None:
        self._index, self._handlers = index, handlers
        self._known: dict[int, Any] = {}

    def of(self, values: Sequence[Any]) -> Any:
        """One value of the values that the experts have in one place."""
        first = values[0]
        if isinstance(first, Taken):
            if any(not isinstance(v, Taken) or (v.root, v.weights) != (first.root, first.weights) for v in values):
                raise Refused("experts of different rows")
            return first.value.unsqueeze(-1 if first.weights else 1)
        if not isinstance(first, Noted):
            return self._constants(values)
        key = id(first.call)
        if key not in self._known:
            self._known[key] = self._called([v.call if isinstance(v, Noted) else None for v in values])
        results = self._known[key]
        return results[first.result] if isinstance(results, (list, tuple)) else results

    def _constants(self, values: Sequence[Any]) -> Any:
        """One for all, or the stack of those that differ."""
        first = values[0]
        if all(v is first for v in values) or (isinstance(first, Known) and all(_equal(v, first) for v in values)):
            return first
        matrices = [v for v in values if isinstance(v, Tensor)]
        if len(matrices) < len(values) or any(v.shape != matrices[0].shape for v in matrices):
            raise Refused("experts of several forms")
        return torch.stack(tuple(matrices))

    def _called(self, calls: Sequence[Call | None]) -> Any:
        first = calls[0]
        if first is None or any(c is None or not _alike(c, first) for c in calls):
            raise Refused("experts that compute differently")
        columns = [[c.inputs[i] for c in calls if c is not None] for i in range(len(first.inputs))]
        if first.node.op_type == "Add":
            for product, bias in (columns, columns[::-1]):
                if _adds_to_product(product[0], bias[0]):
                    return self._product([p.call for p in product], self._constants(bias))
        if first.node.op_type in _PRODUCTS:
            return self._product([c for c in calls if c is not None])
        inputs = [self.of(column) for column in columns]
        if any(self._is_stack(own, value) for own, value in zip(first.inputs, inputs, strict=True)):
            raise Refused("experts with constants of their own besides matrices and biases")
        attributes = {**first.attributes, "axis": -1} if first.node.op_type == "Split" else first.attributes
        if first.node.op_type == "Slice":
            inputs[3] = Known.of([-1])
        return _handler(first, self._handlers)(replace(first, inputs=inputs, attributes=attributes, makers={}))

    def _is_stack(self, own: Any, value: Any) -> bool:
        return isinstance(own, Tensor) and isinstance(value, Tensor) and value.dim() == own.dim() + 1

    def _product(self, calls: Sequence[Call], bias: Any = None) -> Tensor:
        """x times each picked expert's matrix, and its bias."""
        call = calls[0]
        if any(not _alike(c, call) for c in calls):
            raise Refused("experts that compute differently")
        op = call.node.op_type
        given = [i for i in range(2, len(call.inputs)) if isinstance(call.inputs[i], Tensor)]
        if op != "MatMul" and given:
            bias = self._constants([c.inputs[given[-1]] for c in calls])
        x, weight = self.of([c.inputs[0] for c in calls]), self.of([c.inputs[1] for c in calls])
        plain = call.attribute("alpha", 1.0) == 1.0 and call.attribute("beta", 1.0) == 1.0
        whole = isinstance(weight, Tensor) and weight.dim() == 3 and (bias is None or bias.dim() == 2)
        if not whole or not plain or call.attribute("transA", 0):
            raise Refused("experts that share a matrix")
        if op == "MatMul" or (op == "Gemm" and not call.attribute("transB", 0)):
            weight = weight.transpose(1, 2)
        return torch.ops.icc_trace.expert_linear(x.squeeze(1) if x.shape[1] == 1 else x, weight, bias, self._index)


def _adds_to_product(product: Any, bias: Any) -> bool:
    """Whether a bias is added to a product that has none."""
    matrix = isinstance(product, Noted) and product.call.node.op_type == "MatMul"
    return matrix and isinstance(bias, Tensor) and bias.dim() == 1


def _equal(a: Any, b: Known) -> bool:
    return isinstance(a, Known) and a.array.shape == b.array.shape and a.items() == b.items()


def _alike(a: Call, b: Call) -> bool:
    same = a.node.op_type == b.node.op_type and a.node.domain == b.node.domain and len(a.inputs) == len(b.inputs)
    return same and {k: str(v) for k, v in a.attributes.items()} == {k: str(v) for k, v in b.attributes.items()}
