"""Traces code that treats the sequences of a batch differently, `y[mask] = f(x[mask])`, for a batch of one.

The number of sequences that a mask selects depends on values, which a trace does not allow. A batch of one is selected
as a whole or not at all, so f is traced for it, and the mask decides whether the result is written. A mask that only
reads is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ...errors import UnsupportedModel


def _of_sequences(x: Tensor, index: Any) -> bool:
    """Whether an index is a mask over a batch of one."""
    return (
        isinstance(index, Tensor)
        and index.dtype == torch.bool
        and index.shape == (1,)
        and x.dim() > 1
        and type(x.shape[0]) is int
        and x.shape[0] == 1
    )


@contextlib.contextmanager
def masks_of_one_sequence() -> Iterator[None]:
    """A context in which a read with such a mask returns the whole tensor, and a write with it becomes `where`.
    UnsupportedModel at its end if a mask was only read with."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    get, put = Tensor.__getitem__, Tensor.__setitem__

    def getitem(self: Tensor, index: Any) -> Tensor:
        if _of_sequences(self, index):
            read.append(index)
            return self
        return get(self, index)

    def setitem(self: Tensor, index: Any, value: Any) -> None:
        if not _of_sequences(self, index) or not any(index is mask for mask in read):
            put(self, index, value)
            return
        written.append(index)
        self.copy_(torch.where(index.view(-1, *(1,) * (self.dim() - 1)), value, self))

    patch: Callable[..., Any] = mock.patch.object
    with patch(Tensor, "__getitem__", getitem), patch(Tensor, "__setitem__", setitem):
        yield
    if any(all(mask is not other for other in written) for mask in read):
        raise UnsupportedModel("the model picks sequences of a batch by a mask", op="aten.index")
