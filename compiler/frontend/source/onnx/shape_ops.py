"""Handlers of ops that make, read and change shapes."""

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
from .table import OnnxCall, Table

HANDLERS = Table()

_LARGEST = 1 << 28  # most elements of a tensor that a node makes without tensor operands


def sizes(value: Tensor | Known) -> list[Any]:
    """The shape of a tensor [..] or of a known value, including symbolic sizes."""
    return list(value.shape) if isinstance(value, Tensor) else list(value.array.shape)


def _made(shape: list[Any]) -> list[Any]:
    """A shape that a node creates. Refused if it is too large."""
    fixed = math.prod(s for s in shape if isinstance(s, int))
    if fixed > _LARGEST or any(isinstance(s, int) and s < 0 for s in shape):
        raise Refused(f"a tensor of the shape {shape}")
    return shape


@HANDLERS.handles("Shape")
def shape(c: OnnxCall) -> Known:
    """Shape, or a part of it."""
    found = sizes(c.inputs[0])
    return Known.of(found[slice(c.attribute("start", 0), c.attribute("end", None))])


@HANDLERS.handles("Size")
def size(c: OnnxCall) -> Known:
    """Size: the number of elements."""
    return Known.of(math.prod(sizes(c.inputs[0])))


@HANDLERS.handles("Identity", "Dropout", "SequenceAt")
def identity(c: OnnxCall) -> Any:
    """Ops that change nothing when a model is run: Identity, Dropout and SequenceAt."""
    return c.inputs[0]


@HANDLERS.handles("Cast", "CastLike")
def cast(c: OnnxCall) -> Any:
    """Cast and CastLike. All floats are float32 while a model is traced. Refused for an unknown type."""
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
def reshape(c: OnnxCall) -> Any:
    """Reshape: a size of 0 is that of the operand's axis with the same index, and -1 is inferred."""
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
    """A shape with its -1 replaced, if the other sizes determine it: T cancels T."""
    places = [i for i, s in enumerate(wanted) if isinstance(s, int) and s == -1]
    if len(places) != 1:
        return wanted
    left, right = list(before), [s for i, s in enumerate(wanted) if i != places[0]]
    for s in [s for s in right if isinstance(s, torch.SymInt)]:
        same = next((i for i, o in enumerate(left) if isinstance(o, torch.SymInt) and str(o) == str(s)), None)
        if same is None:
            return wanted
        left.pop(same)
        right.pop(next(i for i, o in enumerate(right) if o is s))  # == would add a guard to the trace
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
def flatten(c: OnnxCall) -> Any:
    """Flatten: a matrix of the axes before `axis`, and of those from it on."""
    value, axis = c.tensor(0), c.attribute("axis", 1)
    axis %= value.dim() + 1
    return value.reshape(math.prod(value.shape[:axis]), math.prod(value.shape[axis:]))


@HANDLERS.handles("Unsqueeze")
def unsqueeze(c: OnnxCall) -> Any:
    """Unsqueeze: new axes of size 1 at indices of the result."""
    value, axes = c.inputs[0], c.axes(1) or []
    rank = len(sizes(value)) + len(axes)
    places = sorted(a % rank for a in axes)
    if isinstance(value, Known):
        return Known(np.expand_dims(value.array, tuple(places)), value.dtype)
    for place in places:
        value = value.unsqueeze(place)
    return value


@HANDLERS.handles("Squeeze")
def squeeze(c: OnnxCall) -> Any:
    """Squeeze: axes of size 1 removed; all of them if no axes are given."""
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
def transpose(c: OnnxCall) -> Any:
    """Transpose; by default all axes are reversed."""
    value = c.inputs[0]
    rank = len(sizes(value))
    order = list(c.attribute("perm", range(rank)[::-1]))
    if isinstance(value, Known):
        return Known(value.array.transpose(order), value.dtype)
    return value.permute(order)


@HANDLERS.handles("Expand")
def expand(c: OnnxCall) -> Any:
    """Expand: the value repeated along axes of size 1, where the shapes broadcast."""
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
def tile(c: OnnxCall) -> Any:
    """Tile: the value repeated along each axis."""
    value, counts = c.inputs[0], c.known(1).ints()
    if isinstance(value, Known):
        return Known(np.tile(value.array, counts), value.dtype)
    return value.repeat(counts)


@HANDLERS.handles("ConstantOfShape")
def constant_of_shape(c: OnnxCall) -> Any:
    """ConstantOfShape: a known value if it is small and its sizes are numbers, else a tensor."""
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
def range_(c: OnnxCall) -> Any:
    """Range: a known value if it is small, else a tensor; Refused if it is too large."""
    start, end, step = (c.known(i).item() for i in range(3))
    dtype = c.inputs[0].dtype
    if all(isinstance(v, int) for v in (start, end, step)) and 0 <= (end - start) // step <= SMALL:
        return Known.of(list(range(start, end, step)), dtype)
    if all(isinstance(v, (int, float)) for v in (start, end, step)) and (end - start) / step > _LARGEST:
        raise Refused(f"a range of {(end - start) / step} numbers")
    return torch.arange(start, end, step, dtype=dtype, device=c.device)


@HANDLERS.handles("Trilu")
def trilu(c: OnnxCall) -> Any:
    """Trilu: the upper or the lower triangle."""
    value, k = c.tensor(0), int(c.known(1, 0).item())
    return torch.triu(value, k) if c.attribute("upper", 1) else torch.tril(value, k)


@HANDLERS.handles("NonZero")
def nonzero(c: OnnxCall) -> Any:
    """NonZero of a known value, such as the repeats of repeat_interleave: its indices [axes, N]."""
    if not isinstance(c.inputs[0], Known):
        return refused(c)
    array = c.inputs[0].array
    places = [place for place in np.ndindex(*array.shape) if array[place]]
    found = np.empty((array.ndim, len(places)), dtype=object)
    for column, place in enumerate(places):
        found[:, column] = place
    return Known(found, torch.int64)


@HANDLERS.handles("Loop", "Scan", "Compress")
def refused(c: OnnxCall) -> Any:
    """Raise Refused: ops whose results have shapes that depend on values, or that mix tokens."""
    raise Refused("its result has a shape that depends on values, or it mixes tokens")
