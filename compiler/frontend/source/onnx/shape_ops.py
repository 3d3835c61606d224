"""Handlers of ops that make, read and change shapes, and that pick and join elements."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .container import DTYPES, open_tensor
from .errors import Refused
from .inputs import AllRows
from .known import SMALL, Known, constant, converted
from .table import Call, Table

HANDLERS = Table()
_LARGEST = 1 << 28  # elements of a tensor that a node makes from nothing
_FAR = 1 << 31  # an end beyond every axis


def sizes(value: Tensor | Known) -> list[Any]:
    """The shape of a value."""
    return list(value.shape) if isinstance(value, Tensor) else list(value.array.shape)


def _made(shape: list[Any]) -> list[Any]:
    """A shape that a node asks for, unless it is absurd."""
    fixed = math.prod(s for s in shape if isinstance(s, int))
    if fixed > _LARGEST or any(isinstance(s, int) and s < 0 for s in shape):
        raise Refused(f"a tensor of the shape {shape}")
    return shape


@HANDLERS.handles("Shape")
def shape(c: Call) -> Known:
    found = sizes(c.inputs[0])
    return Known.of(found[slice(c.attribute("start", 0), c.attribute("end", None))])


@HANDLERS.handles("Size")
def size(c: Call) -> Known:
    return Known.of(math.prod(sizes(c.inputs[0])))


@HANDLERS.handles("Identity", "Dropout", "SequenceAt")
def identity(c: Call) -> Any:
    return c.inputs[0]


@HANDLERS.handles("Cast", "CastLike")
def cast(c: Call) -> Any:
    kind = c.attributes.get("to")
    if kind is None:
        other = c.inputs[1]
        dtype = other.dtype
    else:
        if kind not in DTYPES:
            raise Refused(f"a conversion to the type {kind}")
        dtype = DTYPES[kind]
    dtype = torch.float32 if dtype.is_floating_point else dtype  # all floats compute in float32
    value = c.inputs[0]
    if isinstance(value, Known):
        return converted(value, dtype)
    return value if value.dtype == dtype else value.to(dtype)


@HANDLERS.handles("Reshape")
def reshape(c: Call) -> Any:
    value, wanted = c.inputs[0], c.known(1).ints()
    if isinstance(value, AllRows):
        return value
    before = sizes(value)
    if not c.attribute("allowzero", 0):
        wanted = [before[i] if isinstance(s, int) and s == 0 else s for i, s in enumerate(wanted)]
    wanted = _inferred(before, wanted)
    if isinstance(value, Known):
        return Known(value.array.reshape([int(s) for s in wanted]), value.dtype)
    return value.reshape(wanted)


def _inferred(before: list[Any], wanted: list[Any]) -> list[Any]:
    """A shape with its -1 as a number where the rest of both shapes says it: T cancels T."""
    places = [i for i, s in enumerate(wanted) if isinstance(s, int) and s == -1]
    if len(places) != 1:
        return wanted
    left, right = list(before), [s for i, s in enumerate(wanted) if i != places[0]]
    for s in [s for s in right if isinstance(s, torch.SymInt)]:
        same = next((i for i, o in enumerate(left) if isinstance(o, torch.SymInt) and str(o) == str(s)), None)
        if same is None:
            return wanted
        left.pop(same)
        right.remove(s)
    free = [s for s in left if isinstance(s, torch.SymInt)]
    fixed = math.prod(s for s in left if not isinstance(s, torch.SymInt))
    divisor = math.prod(right)
    if divisor == 0 or fixed % divisor or len(free) > 1:
        return wanted
    found = fixed // divisor
    result = list(wanted)
    result[places[0]] = found * free[0] if free else found
    return result


@HANDLERS.handles("Flatten")
def flatten(c: Call) -> Any:
    value, axis = c.tensor(0), c.attribute("axis", 1)
    axis %= value.dim() + 1
    return value.reshape(math.prod(value.shape[:axis]), math.prod(value.shape[axis:]))


@HANDLERS.handles("Unsqueeze")
def unsqueeze(c: Call) -> Any:
    value, axes = c.inputs[0], c.axes(1) or []
    rank = len(sizes(value)) + len(axes)
    places = sorted(a % rank for a in axes)
    if isinstance(value, Known):
        return Known(np.expand_dims(value.array, tuple(places)), value.dtype)
    for place in places:
        value = value.unsqueeze(place)
    return value


@HANDLERS.handles("Squeeze")
def squeeze(c: Call) -> Any:
    value, axes = c.inputs[0], c.axes(1)
    found = sizes(value)
    places = [i for i, s in enumerate(found) if isinstance(s, int) and s == 1] if axes is None else axes
    places = sorted((a % len(found) for a in places), reverse=True)
    if isinstance(value, Known):
        return Known(np.squeeze(value.array, tuple(places)), value.dtype)
    for place in places:
        value = value.squeeze(place)
    return value


@HANDLERS.handles("Transpose")
def transpose(c: Call) -> Any:
    value = c.inputs[0]
    rank = len(sizes(value))
    order = list(c.attribute("perm", range(rank)[::-1]))
    if isinstance(value, Known):
        return Known(value.array.transpose(order), value.dtype)
    return value.permute(order)


@HANDLERS.handles("Concat")
def concat(c: Call) -> Any:
    axis = c.attribute("axis", 0)
    if c.all_known:
        return Known(np.concatenate([v.array for v in c.inputs], axis), c.inputs[0].dtype)
    values = [c.as_tensor(v) for v in c.inputs]
    kept = [v for v in values if not (isinstance(v.shape[axis], int) and v.shape[axis] == 0)] or values[:1]
    return kept[0] if len(kept) == 1 else torch.cat(kept, axis)  # what is empty is a cache


@HANDLERS.handles("Split")
def split(c: Call) -> Any:
    value, axis = c.tensor(0), c.attribute("axis", 0)
    total, count = value.shape[axis], len(c.node.output)
    given = c.axes(1, "split")
    if given is None:
        step = -(-total // c.attribute("num_outputs", count))
        given = [min(step, total - start) for start in range(0, total, step)]
    return list(torch.split(value, given, axis))


@HANDLERS.handles("Slice")
def slice_(c: Call) -> Any:
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
        return Known(np.flip(value.array[tuple(index)], tuple(reversed_axes)), value.dtype)
    value = value[tuple(index)]
    return value.flip(reversed_axes) if reversed_axes else value


def _is_whole_backwards(start: Any, end: Any) -> bool:
    return isinstance(start, int) and isinstance(end, int) and (start == -1 or start >= _FAR) and end < -_FAR


@HANDLERS.handles("Gather")
def gather(c: Call) -> Any:
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


def _picked(c: Call, value: Tensor, axis: int, index: Known) -> Tensor:
    """Elements at known places of an axis: one, a run of them, or any."""
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
def gather_elements(c: Call) -> Any:
    return torch.gather(c.tensor(0), c.attribute("axis", 0), c.tensor(1))


@HANDLERS.handles("GatherND")
def gather_nd(c: Call) -> Any:
    value, index, batch = c.tensor(0), c.tensor(1), c.attribute("batch_dims", 0)
    if batch:
        raise Refused("a GatherND with batch axes")
    return value[tuple(index[..., i] for i in range(index.shape[-1]))]


@HANDLERS.handles("ScatterElements")
def scatter_elements(c: Call) -> Any:
    value, index, source = c.tensor(0), c.tensor(1), c.tensor(2)
    axis, kind = c.attribute("axis", 0), c.attribute("reduction", "none")
    if kind not in ("none", "add"):
        raise Refused(f"a scatter that takes the {kind}")
    return value.scatter_add(axis, index, source) if kind == "add" else value.scatter(axis, index, source)


@HANDLERS.handles("Expand")
def expand(c: Call) -> Any:
    value, wanted = c.inputs[0], c.known(1).ints()
    before = sizes(value)
    rank = max(len(before), len(wanted))
    before = [1] * (rank - len(before)) + before
    wanted = [1] * (rank - len(wanted)) + wanted
    result = _made([b if isinstance(w, int) and w == 1 else w for b, w in zip(before, wanted, strict=True)])
    if isinstance(value, Known):
        if all(isinstance(s, int) for s in result) and math.prod(result) <= SMALL:
            return Known(np.broadcast_to(value.array, result), value.dtype)
        value = c.as_tensor(value)
    return value.expand(result)


@HANDLERS.handles("Tile")
def tile(c: Call) -> Any:
    value, counts = c.inputs[0], c.known(1).ints()
    if isinstance(value, Known):
        return Known(np.tile(value.array, counts), value.dtype)
    return value.repeat(counts)


@HANDLERS.handles("ConstantOfShape")
def constant_of_shape(c: Call) -> Any:
    wanted = _made(c.known(0).ints())
    proto = c.attributes.get("value")
    fill: Any = 0.0
    dtype = torch.float32
    if proto is not None:
        found = constant(open_tensor(Path(), proto))
        fill, dtype = found.item(), found.dtype
    if all(isinstance(s, int) for s in wanted) and math.prod(wanted) <= SMALL:
        array = np.empty(wanted, dtype=object)
        array.fill(fill)
        return Known(array, dtype)
    return torch.full(wanted, fill, dtype=dtype, device=c.device)


@HANDLERS.handles("Range")
def range_(c: Call) -> Any:
    start, end, step = (c.known(i).item() for i in range(3))
    dtype = c.inputs[0].dtype
    if all(isinstance(v, int) for v in (start, end, step)) and 0 <= (end - start) // step <= SMALL:
        return Known.of(list(range(start, end, step)), dtype)
    if all(isinstance(v, (int, float)) for v in (start, end, step)) and (end - start) / step > _LARGEST:
        raise Refused(f"a range of {(end - start) / step} numbers")
    return torch.arange(start, end, step, dtype=dtype, device=c.device)


@HANDLERS.handles("Trilu")
def trilu(c: Call) -> Any:
    value, k = c.tensor(0), int(c.known(1, 0).item())
    return torch.triu(value, k) if c.attribute("upper", 1) else torch.tril(value, k)


@HANDLERS.handles("NonZero", "Loop", "Scan", "ScatterND", "Compress")
def refused(c: Call) -> Any:
    raise Refused("its result has a shape that depends on values, or it mixes tokens")
