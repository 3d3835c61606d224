"""The functions that lower ops to steps or to strides: a table that another package may add to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ..ops import Op
from .attention_ops import ATTENTION_LOWERING
from .collective_ops import COLLECTIVE_LOWERING
from .compute_ops import COMPUTE_LOWERING
from .context import Lowerer
from .shape_ops import SHAPE_LOWERING
from .state_ops import STATE_LOWERING

Lowering = Callable[[Lowerer, fx.Node], Any]  # returns the places of a node's results

# by the target of a node
LOWERINGS: dict[Any, Lowering] = {
    **SHAPE_LOWERING, **COMPUTE_LOWERING, **ATTENTION_LOWERING, **STATE_LOWERING, **COLLECTIVE_LOWERING,
}  # fmt: skip


def register_lowering(op: Op, lowering: Lowering) -> None:
    """Add the lowering of an op; ValueError if it has one."""
    if LOWERINGS.setdefault(op.overload, lowering) is not lowering:
        raise ValueError(f"op {op.name!r} has a lowering already")
