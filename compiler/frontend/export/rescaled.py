"""Keeps weights that a model divides before it runs as the checkpoint has them.

RWKV halves its hidden states every few layers to fit into 16 bits, by dividing weights in place. The engine needs the
weights unchanged, so the results of their modules are divided instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor, nn


@contextlib.contextmanager
def weights_as_stored(model: nn.Module) -> Iterator[None]:
    """A context in which modules of `model` that divide their weights divide their results instead."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if not hasattr(module, "_rescale_layers") or getattr(module, "layers_are_rescaled", True):
                continue
            divisors = _divisors(module._rescale_layers)  # type: ignore[arg-type]
            stack.callback(setattr, module, "layers_are_rescaled", False)
            for part in module.modules():
                divisor = divisors.get(id(getattr(part, "weight", None)), 1)
                if divisor != 1:
                    part.result_divisor = divisor  # type: ignore[assignment]
                    stack.callback(part.register_forward_hook(_divided).remove)
        yield


def _divisors(divide: Callable[[], Any]) -> dict[int, float]:
    """The divisor of each tensor that a function divides, by the tensor's id; the tensors are not changed."""
    found: dict[int, float] = {}

    def note(weight: Tensor, by: float) -> Tensor:
        found[id(weight)] = by
        return weight

    with mock.patch.object(Tensor, "div_", note):
        divide()
    return found


def _divided(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result / module.result_divisor  # type: ignore[operator]
