"""Recognises experts in the form in which TorchScript exports a loop over them.

For each expert NonZero finds its tokens, which are gathered, multiplied with its matrices, weighted, and added at the
positions that they came from. Which tokens these are depends on values. The calls on them are therefore recorded for
each expert (`Noted`). If all experts compute the same with their own matrices, the sum becomes products with the
experts that each token selected. Indices of the routing are known only by how they were made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .errors import Refused
from .expert_stack import computed
from .expert_values import (
    EXPERT,
    FORM,
    NUMBER,
    OF_PLACES,
    SAME,
    SLOT,
    TOKEN,
    Added,
    ExpertMarks,
    ExpertPlace,
    ExpertPlaces,
    Handlers,
    Noted,
    Picks,
    Taken,
    row_handler,
)  # fmt: skip
from .known import Known
from .table import OnnxCall

VALUES = (ExpertMarks, ExpertPlaces, ExpertPlace, *OF_PLACES, Added)


def one_hot(c: OnnxCall) -> ExpertMarks:
    """OneHot of selected experts, index[T, S], as ExpertMarks."""
    index, count, values = c.tensor(0), c.known(1), c.known(2)
    if index.dim() != 2 or values.items() != [0, 1] or c.attribute("axis", -1) not in (-1, 2) or not count.is_one:
        raise Refused("marks of another form than those of picked experts")
    return ExpertMarks(Picks(index, int(count.item())), (TOKEN, SLOT, EXPERT))


def follow(c: OnnxCall, handlers: Handlers) -> Any:
    """The result of a call with such symbolic operands. A sum is computed as soon as another op reads it."""
    op = c.node.op_type
    first = c.inputs[0]
    if any(isinstance(value, OF_PLACES) for value in c.inputs) and op != "ScatterElements":
        return _noted(c, handlers)
    if op == "Add" and (joined := _joined(c)) is not None:
        return joined
    if op in ("Slice", "Shape") and isinstance(first, Added):
        return Known.of([1, 1]) if op == "Shape" else first  # the exporter reads it to broadcast
    if op == "ScatterElements":
        return _scattered(c)
    if any(isinstance(value, Added) for value in c.inputs):
        given = [computed(value, handlers) if isinstance(value, Added) else value for value in c.inputs]
        whole = replace(c, inputs=given)
        return handlers[op](whole)
    step = _STEPS.get(op)
    if step is None:
        raise Refused(FORM)
    return step(c)


def _transposed(c: OnnxCall) -> Any:
    value = c.inputs[0]
    if isinstance(value, ExpertPlaces):
        return replace(value, turned=not value.turned)
    if isinstance(value, ExpertMarks):
        order = c.attribute("perm", list(range(len(value.axes)))[::-1])
        return replace(value, axes=tuple(value.axes[i] for i in order))
    raise Refused(FORM)


def _gathered(c: OnnxCall) -> Any:
    value, index = c.inputs[:2]
    if isinstance(value, ExpertMarks) and isinstance(index, Known) and index.is_one:
        axis = c.attribute("axis", 0) % len(value.axes)
        if value.axes[axis] != EXPERT or not 0 <= int(index.item()) < value.picks.count:
            raise Refused(FORM)
        kept = value.axes if index.array.ndim else (*value.axes[:axis], *value.axes[axis + 1 :])
        return ExpertMarks(value.picks, kept, int(index.item()))
    if isinstance(value, ExpertPlaces) and isinstance(index, Known) and index.is_one:
        return _place(value, int(index.item()))
    if isinstance(index, ExpertPlace) and isinstance(value, Tensor):
        return _taken(value, index, c.attribute("axis", 0), _root(c))
    raise Refused(FORM)


def _place(places: ExpertPlaces, row: int) -> ExpertPlace:
    axis = places.marks.axes[row]
    return ExpertPlace(places.marks, token=int(axis == TOKEN), slot=int(axis == SLOT))


def _root(c: OnnxCall) -> str:
    name = c.node.input[0]
    while (made := c.makers.get(name)) is not None and made.node.op_type in (*SAME, "Flatten"):
        name = made.node.input[0]
    return name


def _taken(value: Tensor, place: ExpertPlace, axis: int, root: str) -> Taken:
    slots = place.marks.picks.index.shape[1]
    if (place.token, place.slot) == (1, 0) and all(s == 1 for s in (*value.shape[:axis], *value.shape[axis + 1 : -1])):
        return Taken(value.reshape(value.shape[axis], value.shape[-1]), place.marks.expert, root)
    if (place.token, place.slot) == (slots, 1) and axis == 0 and value.dim() <= 2:
        return Taken(value.reshape(-1, slots), place.marks.expert, root, weights=True)
    raise Refused(FORM)


def _parts(c: OnnxCall) -> Any:
    value = c.inputs[0]
    if isinstance(value, ExpertPlaces) and value.turned and c.attribute("axis", 0) % 2 == 1:
        return [_place(value, row) for row in range(len(value.marks.axes))]
    raise Refused(FORM)


def _nonzero(c: OnnxCall) -> Any:
    if isinstance(c.inputs[0], ExpertMarks) and EXPERT not in c.inputs[0].axes:
        return ExpertPlaces(c.inputs[0])
    raise Refused(FORM)


def _squeezed(c: OnnxCall) -> Any:
    value = c.inputs[0]
    if isinstance(value, ExpertMarks) and value.expert >= 0:
        return replace(value, axes=tuple(axis for axis in value.axes if axis != EXPERT))
    return _kept(c)


def _kept(c: OnnxCall) -> Any:
    if isinstance(c.inputs[0], (ExpertMarks, ExpertPlace)):
        return c.inputs[0]
    raise Refused(FORM)


def _arithmetic(c: OnnxCall) -> Any:
    a, b = c.inputs
    if isinstance(a, Known):
        a, b = b, a
    if isinstance(a, ExpertPlace) and isinstance(b, Known) and b.is_one and c.node.op_type == "Mul":
        return replace(a, token=a.token * int(b.item()), slot=a.slot * int(b.item()))
    if isinstance(a, ExpertPlace) and isinstance(b, ExpertPlace) and a.marks is b.marks and c.node.op_type == "Add":
        return replace(a, token=a.token + b.token, slot=a.slot + b.slot)
    raise Refused(FORM)


def _shape(c: OnnxCall) -> Known:
    return Known.of([NUMBER] if isinstance(c.inputs[0], ExpertPlace) else [NUMBER] * len(c.inputs[0].axes))


_STEPS: dict[str, Callable[[OnnxCall], Any]] = {
    "Transpose": _transposed, "Gather": _gathered, "Split": _parts, "NonZero": _nonzero, "Squeeze": _squeezed,
    "Mul": _arithmetic, "Add": _arithmetic, "Shape": _shape,
    **dict.fromkeys(("Cast", "Identity", "Expand", "Reshape", "Unsqueeze", "Flatten"), _kept),
}  # fmt: skip


def _noted(c: OnnxCall, handlers: Handlers) -> Any:
    """Record a call on rows of one expert; a call that changes only axes of size 1 returns its operand."""
    experts, op, first = {v.expert for v in c.inputs if isinstance(v, OF_PLACES)}, c.node.op_type, c.inputs[0]
    if len(experts) > 1 or any(isinstance(value, Added) for value in c.inputs):
        raise Refused("values of two experts in one")
    if op == "Shape":
        return Known.of([NUMBER, _width(first)])
    if op in SAME:
        if not isinstance(first, OF_PLACES) or (op == "Reshape" and c.known(1).items()[-1] not in (-1, _width(first))):
            raise Refused(FORM)
        weighs = isinstance(first, Taken) and first.weights
        if op in ("Unsqueeze", "Squeeze") and not weighs and (c.axes(1) or [0]) != [0]:
            raise Refused(FORM)
        return first
    (expert,) = experts
    with _disable_current_modes():
        sizes = [_as_meta(value) for value in c.inputs]
        found = row_handler(c, handlers)(replace(c, inputs=sizes, device=torch.device("meta"), makers={}))
    widths = [int(v.shape[-1]) for v in (found if isinstance(found, (list, tuple)) else [found])]
    return [Noted(c, expert, i, width) for i, width in enumerate(widths)]


def _width(value: Taken | Noted) -> int:
    if isinstance(value, Noted):
        return value.width
    return 1 if value.weights else int(value.value.shape[-1])


def _as_meta(value: Any) -> Any:
    """A meta tensor in place of a value: one row, for rows of an expert."""
    if isinstance(value, OF_PLACES):
        return torch.empty(1, _width(value), device="meta")
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def _scattered(c: OnnxCall) -> Added:
    """One expert's results, scattered into zeros, or added to a sum, at their tokens."""
    base, place, values = c.inputs[:3]
    blank = isinstance(base, Added) or _is_zero(c, 0)
    if not (isinstance(place, ExpertPlace) and isinstance(values, Noted) and blank) or c.attribute("axis", 0) != 0:
        raise Refused(FORM)
    if (place.token, place.slot) != (1, 0) or values.expert != place.marks.expert:
        raise Refused("results of experts put elsewhere than they came from")
    if isinstance(base, Added):
        if c.attribute("reduction", "none") != "add" or base.picks is not place.marks.picks:
            raise Refused(FORM)
        return Added(base.picks, (*base.terms, values))
    return Added(place.marks.picks, (values,))


def _joined(c: OnnxCall) -> Added | None:
    """The sum of two sums over experts, or of one and zeros; None for other operands."""
    a, b = c.inputs
    if isinstance(a, Added) and isinstance(b, Added) and a.picks is b.picks:
        return Added(a.picks, (*a.terms, *b.terms))
    for number, (value, other) in enumerate(((a, b), (b, a))):
        if isinstance(value, Added) and not isinstance(other, Added) and _is_zero(c, 1 - number):
            return value
    return None


def _is_zero(c: OnnxCall, index: int) -> bool:
    made = c.maker(index, "ConstantOfShape")
    if made is None:
        return False
    proto = made.attributes.get("value")
    return proto is None or (not any(proto.raw_data) and not any(proto.float_data))
