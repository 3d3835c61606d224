"""The aten ops that remain in graphs: those that only move elements. The memory plan turns them into strides or
copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .base import OPS, Op
from .traits import Traits

aten = torch.ops.aten
Samples = Callable[[], Iterator[tuple[Any, ...]]]


def _declare(overload: Any, doc: str, samples: Samples, reference: Any = None, strided: bool = True) -> None:
    name = overload.name().split(".")[0].replace("::", ".")
    found = Traits(moves_only=True, strided=strided)
    OPS.add(Op(name, reference or overload, overload, found, 0.0, samples=samples, doc=doc))


def _view() -> Iterator[tuple[Any, ...]]:
    yield torch.randn(3, 2, 6), [-1, 4, 3]


def _permute() -> Iterator[tuple[Any, ...]]:
    yield torch.randn(3, 2, 5), [0, 2, 1]


def _expand() -> Iterator[tuple[Any, ...]]:
    yield torch.randn(3, 1, 5), [-1, 4, 5]


def _slice() -> Iterator[tuple[Any, ...]]:
    yield torch.randn(3, 11), 1, 2, 9, 3


def _cat() -> Iterator[tuple[Any, ...]]:
    yield [torch.randn(3, 5), torch.randn(3, 2)], 1


def _repeat() -> Iterator[tuple[Any, ...]]:
    yield torch.randn(3, 2, 5), [1, 3, 2]


# In the IR every value is dense, so a view never fails; torch's own refuses the strided results of slice and permute.
_declare(aten.view.default, "The elements in order under another shape.", _view, aten.reshape.default)
_declare(aten.permute.default, "The axes in another order.", _permute)
_declare(aten.expand.default, "Axes of size 1 repeated.", _expand)
_declare(aten.slice.Tensor, "Elements start, start + step, ... of one axis.", _slice)
_declare(aten.cat.default, "Values joined along one axis.", _cat, strided=False)
_declare(aten.repeat.default, "The whole repeated along each axis.", _repeat, strided=False)
