"""Weights as lazy handles: a shape, a dtype and a way to get the values, which no one holds on to.

A pass that needs values calls `load`; passes that only move or combine weights wrap handles in handles, so that a
compile streams and its peak memory is a few times its largest layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


class Weight(ABC):
    """A constant of the graph. `shape` and `dtype` describe what `load` returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def load(self) -> Tensor:
        """Read or compute the values; the caller must not modify the result."""

    def describe(self) -> str:
        """The type as the printer shows it, such as bf16[64, 32]."""
        return f"{short_dtype(self.dtype)}[{', '.join(map(str, self.shape))}]"


@dataclass
class Constant(Weight):
    """A value that the trace or a pass made; small."""

    value: Tensor
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.shape, self.dtype = tuple(self.value.shape), self.value.dtype

    def load(self) -> Tensor:
        return self.value


@dataclass
class Derived(Weight):
    """`fn` of other weights, computed at every load. `sources` lets passes see what a value is made of."""

    fn: Callable[..., Tensor]
    sources: tuple[Weight, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def load(self) -> Tensor:
        value = self.fn(*(source.load() for source in self.sources))
        assert tuple(value.shape) == self.shape, f"derived weight has shape {tuple(value.shape)}, not {self.shape}"
        return value


def derive(fn: Callable[..., Tensor], *sources: Weight) -> Derived:
    """Derived weight whose shape and dtype come from running `fn` on meta tensors."""
    meta = fn(*(torch.empty(s.shape, dtype=s.dtype, device="meta") for s in sources))
    return Derived(fn, sources, tuple(meta.shape), meta.dtype)


_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


def short_dtype(dtype: torch.dtype) -> str:
    """f32, bf16, ...: the name used in graph text and program files."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))
