"""Handlers of ops that select and join elements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import Refused
from .inputs import AllRows
from .known import Known
from .shape_ops import sizes
from .table import OnnxCall, Table

HANDLERS = Table()

_FAR = 1 << 31  # an end beyond any axis


@HANDLERS.handles("Concat")
def concat(c: OnnxCall) -> Any:
    """Concat. Tensors with no elements along the axis, such as an empty cache, are left out."""
    axis = c.attribute("axis", 0)
    if c.all_known:
        return Known(np.concatenate([v.array for v in c.inputs], axis), c.inputs[0].dtype)
    values = [c.as_tensor(v) for v in c.inputs]
    kept = [v for v in values if not (isinstance(v.shape[axis], int) and v.shape[axis] == 0)] or values[:1]
    return kept[0] if len(kept) == 1 else torch.cat(kept, axis)  # an empty operand is a cache


@HANDLERS.handles("Split")
def split(c: OnnxCall) -> Any:
    """Split by sizes, or into equal parts."""
    value, axis = c.tensor(0), c.attribute("axis", 0)
    total, count = value.shape[axis], len(c.node.output)
    given = c.axes(1, "split")
    if given is None:
        step = -(-total // c.attribute("num_outputs", count))
        given = [min(step, total - start) for start in range(0, total, step)]
    return list(torch.split(value, given, axis))


@HANDLERS.handles("Slice")
def slice_(c: OnnxCall) -> Any:
    """Slice with steps of 1 or more, or a whole axis reversed; Refused otherwise."""
    value = c.inputs[0]
    starts, ends = (
        (c.known(1).ints(), c.known(2).ints())
        if len(c.inputs) > 1
        else (list(c.attribute("starts", [])), list(c.attribute("ends", [])))
    )
    axes = c.axes(3) or list(range(len(starts)))
    steps = c.known(4).ints() if c.given(4) is not None else [1] * len(starts)
    found = sizes(value)
    index: list[Any] = [slice(None)] * len(found)
    reversed_axes = []
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step == -1 and _is_whole_backwards(start, end):
            reversed_axes.append(axis % len(found))
            continue
        if step < 1:
            raise Refused(f"a slice with the step {step}")
        far = isinstance(end, int) and end >= _FAR
        index[axis] = slice(None if isinstance(start, int) and start == 0 else start, None if far else end, step)
    if isinstance(value, Known):
        if not any(isinstance(bound, torch.SymInt) for part in index for bound in (part.start, part.stop)):
            return Known(np.flip(value.array[tuple(index)], tuple(reversed_axes)), value.dtype)
        value = c.as_tensor(value)  # such as the first T of a table of positions
    value = value[tuple(index)]
    return value.flip(reversed_axes) if reversed_axes else value


def _is_whole_backwards(start: Any, end: Any) -> bool:
    return isinstance(start, int) and isinstance(end, int) and (start == -1 or start >= _FAR) and end < -_FAR


@HANDLERS.handles("Gather")
def gather(c: OnnxCall) -> Any:
    """Gather from a known value, rows of a table, or at known indices of any axis."""
    value, index, axis = c.inputs[0], c.inputs[1], c.attribute("axis", 0)
    if isinstance(index, AllRows):
        return value
    if isinstance(value, Known) and isinstance(index, Known):
        places = np.array([int(i) for i in index.items()], dtype=np.int64).reshape(index.array.shape)
        taken = np.take(value.array, places, axis)
        return Known(np.asarray(taken, dtype=object), value.dtype)
    value = c.as_tensor(value)
    axis %= value.dim()
    if isinstance(index, Known):
        return _picked(c, value, axis, index)
    if axis == 0 and value.dim() >= 2:
        rows = value if value.dim() == 2 else value.reshape(value.shape[0], -1)
        found = torch.nn.functional.embedding(index, rows)
        return found.reshape(*index.shape, *value.shape[1:]) if value.dim() > 2 else found
    if axis == 0 and index.dim() == 1:
        return value.index_select(0, index)
    flat = value.index_select(axis, index.reshape(-1))
    return flat.reshape(*value.shape[:axis], *index.shape, *value.shape[axis + 1 :])


def _picked(c: OnnxCall, value: Tensor, axis: int, index: Known) -> Tensor:
    """Elements at known indices of an axis: one, a consecutive range, or any."""
    places = index.ints()
    if index.array.ndim == 0:
        return value.select(axis, places[0])
    step = places[1] - places[0] if len(places) > 1 else 1
    runs = all(isinstance(p, int) for p in places) and step > 0 and places[0] >= 0
    if runs and index.array.ndim == 1 and places == list(range(places[0], places[-1] + 1, step)):
        return value[(slice(None),) * axis + (slice(places[0], places[-1] + 1, step),)]
    if all(isinstance(p, int) for p in places) and index.array.ndim == 1:
        return torch.cat([value.narrow(axis, p % value.shape[axis], 1) for p in places], axis)
    return value.index_select(axis, c.as_tensor(index).reshape(-1)).reshape(
        *value.shape[:axis], *index.array.shape, *value.shape[axis + 1 :]
    )


@HANDLERS.handles("GatherElements")
def gather_elements(c: OnnxCall) -> Any:
    """GatherElements."""
    return torch.gather(c.tensor(0), c.attribute("axis", 0), c.tensor(1))


@HANDLERS.handles("GatherND")
def gather_nd(c: OnnxCall) -> Any:
    """GatherND, without batch axes."""
    value, batch = c.tensor(0), c.attribute("batch_dims", 0)
    if batch:
        raise Refused("a GatherND with batch axes")
    index = c.inputs[1]
    if isinstance(index, Known) and index.array.ndim == 2:
        return _known_places(c, value, index.array)
    index = c.as_tensor(index)
    return value[tuple(index[..., i] for i in range(index.shape[-1]))]


def _known_places(c: OnnxCall, value: Tensor, places: np.ndarray) -> Tensor:
    """Elements at known indices [N, axes] of the first axes, which are flattened to one axis."""
    count = places.shape[1]
    shape = value.shape[:count]
    if not all(isinstance(s, int) for s in (*shape, *places.flat)):
        raise Refused("places that depend on the number of tokens")
    strides = [math.prod(shape[i + 1 :]) for i in range(count)]
    flat = [sum(int(p) % n * s for p, n, s in zip(row, shape, strides, strict=True)) for row in places]
    return _picked(c, value.flatten(0, count - 1), 0, Known.of(flat))


@HANDLERS.handles("ScatterND")
def scatter_nd(c: OnnxCall) -> Any:
    """ScatterND, which torch's exporter creates from an assignment to a slice, mostly in masks."""
    if c.attribute("reduction", "none") != "none":
        raise Refused("a write that adds up")
    value, index, source = c.tensor(0), c.tensor(1), c.tensor(2)
    return torch.index_put(value, tuple(index[..., i] for i in range(index.shape[-1])), source)


@HANDLERS.handles("ScatterElements")
def scatter_elements(c: OnnxCall) -> Any:
    """ScatterElements that writes or adds; Refused for other reductions."""
    value, index, source = c.tensor(0), c.tensor(1), c.tensor(2)
    axis, kind = c.attribute("axis", 0), c.attribute("reduction", "none")
    if kind not in ("none", "add"):
        raise Refused(f"a scatter that takes the {kind}")
    return value.scatter_add(axis, index, source) if kind == "add" else value.scatter(axis, index, source)
