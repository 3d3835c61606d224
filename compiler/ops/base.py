"""How an op of the icc dialect is declared: once, and everything else is derived.

The decorated function is the op's schema, reference, oracle and fake at once. Every tensor that depends on tokens is
token-major: its first axis is the token (or logit row) axis, and the op treats each row on its own, except attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Cost:
    """Work of one call: floating point operations and bytes moved (weights and activations)."""

    flops: float
    bytes: float


@dataclass
class Op:
    """A declared op. `kernels` maps a backend to the lowered op that implements it."""

    name: str
    reference: Callable[..., Any]
    overload: Any
    kernels: dict[str, str]
    tolerance: float
    cost: Callable[..., Cost] | None = None
    samples: Callable[[], Iterable[tuple[Any, ...]]] | None = None
    doc: str = field(default="")

    def set_cost(self, fn: Callable[..., Cost]) -> Callable[..., Cost]:
        """Decorator: the cost function, which takes the op's own arguments."""
        self.cost = fn
        return fn

    def set_samples(self, fn: Callable[[], Iterable[tuple[Any, ...]]]) -> Callable[[], Iterable[tuple[Any, ...]]]:
        """Decorator: a generator of argument tuples for the generated tests, odd sizes included."""
        self.samples = fn
        return fn


OPS: dict[str, Op] = {}


def op(kernels: dict[str, str], tolerance: float = 1e-5) -> Callable[[Callable[..., Any]], Op]:
    """Declare `icc::<function name>`; `tolerance` bounds max |kernel - reference| / max |reference| in float32."""

    def declare(fn: Callable[..., Any]) -> Op:
        custom = torch.library.custom_op(f"icc::{fn.__name__}", fn, mutates_args=())
        custom.register_fake(fn)
        overload = getattr(torch.ops.icc, fn.__name__).default
        declared = Op(fn.__name__, fn, overload, kernels, tolerance, doc=fn.__doc__ or "")
        OPS[fn.__name__] = declared
        return declared

    return declare


def tensor_bytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the given tensors; None counts nothing."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
