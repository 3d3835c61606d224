"""Compares handles of weights without loading them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any, cast

import torch

from .handles import Weight


def same_weight(one: Weight, other: Weight) -> bool:
    """Whether two handles are made in the same way from the same sources, as when the same passes ran over two copies
    of a graph. False if that cannot be shown."""
    return _same(one, other)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, FunctionType):
        held = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (one, other)]
        return one.__code__ is other.__code__ and _same(one.__defaults__, other.__defaults__) and _same(*held)
    if isinstance(one, (tuple, list)):
        ones, others = cast(Sequence[Any], one), cast(Sequence[Any], other)
        return len(ones) == len(others) and all(map(_same, ones, others))
    if isinstance(one, Weight):
        values = [[getattr(w, field.name) for field in fields(w)] for w in (one, other) if is_dataclass(w)]
        return len(values) == 2 and type(one).__eq__ is not object.__eq__ and _same(*values)
    return one == other
