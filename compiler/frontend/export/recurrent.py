"""The second door into transformers: the functions of recurrent layers that its modeling files look up by kernel name.

A modeling file defines `causal_conv1d_fn` and its like as module-level functions, decorated so that a faster kernel of
the same name may stand in. While a model is traced, ours do: they leave one op each in the graph, whatever the family.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModel
from .interfaces import traced


@traced
def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """icc::causal_conv as the models call it: x[1, C, T], weight[C, K] -> [1, C, T]."""
    return torch.empty_like(x)


def causal_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Tensor:
    """hidden_states[1, C, T], weight[C, K]; the kernel of that name in the package causal-conv1d (Dao)."""
    _refuse(kwargs, "causal_conv1d_fn", "seq_idx", "initial_states", "return_final_states")
    out = torch.ops.icc_trace.causal_conv(hidden_states, weight, bias)
    return out if activation is None else _activation(activation)(out)


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    from transformers.activations import ACT2FN

    return ACT2FN[name]


def _refuse(options: dict[str, Any], function: str, *names: str) -> None:
    for name in names:
        if options.get(name) is not None and options[name] is not False:
            raise UnsupportedModel(f"{function} with {name} is not supported", op=function)


FUNCTIONS: dict[str, Callable[..., Any]] = {"causal_conv1d_fn": causal_conv1d_fn}


@contextlib.contextmanager
def recurrent_functions(model: nn.Module) -> Iterator[None]:
    """Ours in the place of those that the modules of `model` call."""
    files = {type(module).__module__ for module in model.modules()}
    with contextlib.ExitStack() as stack:
        for file in sorted(files & sys.modules.keys()):
            for name in FUNCTIONS.keys() & vars(sys.modules[file]).keys():
                stack.enter_context(mock.patch.object(sys.modules[file], name, FUNCTIONS[name]))
        yield
