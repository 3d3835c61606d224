"""The second door into transformers: the functions of recurrent layers that its modeling files look up by kernel name.

A modeling file defines a causal convolution, a delta rule or a scan as a function of its own, decorated with the name
of a kernel that may stand in for it. While a model is traced, ours do: they leave one op each in the graph, whatever
the family and whatever its file calls the function.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import UnsupportedModel
from .interfaces import traced

_DECORATOR = re.compile(r"@use_kernel_\w+\(\s*\"(\w+)\"")
_EPS = 1e-6  # of the norm of queries and keys in a delta rule


@traced
def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """icc::causal_conv as the models call it: x[1, C, T], weight[C, K] -> [1, C, T]."""
    return torch.empty_like(x)


@traced
def gated_scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, delta: bool) -> Tensor:
    """icc::gated_scan as the models call it: q, k[1, T, Hk, K], v[1, T, H, V], decay[1, T, H] or [1, T, H, K]."""
    return torch.empty_like(v)


@traced
def selective_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """icc::selective_scan as the models call it: x, dt[1, C, T], a[C, N], b, c[1, N, T] -> [1, C, T]."""
    return torch.empty_like(x)


def causal_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Tensor:
    """hidden_states[1, C, T], weight[C, K]; the kernel of that name in the package causal-conv1d (Dao)."""
    _refuse("causal_conv1d_fn", kwargs, "seq_idx", "initial_states", "return_final_states")
    out = torch.ops.icc_trace.causal_conv(hidden_states, weight, bias)
    return out if activation is None else _activation(activation)(out)


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *args: Any,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule and Kimi delta attention of the package fla: query, key[1, T, Hk, K], value[1, T, H, V]."""
    _refuse("a delta rule", kwargs, "initial_state", "output_final_state", "cu_seqlens")
    width = query.shape[-1]
    if use_qk_l2norm_in_kernel:
        query, key = (_unit(x) for x in (query, key))
    return torch.ops.icc_trace.gated_scan(query * width**-0.5, key, value, g, beta, True), None


def mamba_chunk_scan_combined(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *args: Any,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> Tensor:
    """Mamba-2's scan of the package mamba_ssm: hidden_states[1, T, H, P], dt[1, T, H], A[H], B, C[1, T, G, N]."""
    _refuse("mamba_chunk_scan_combined", kwargs, "initial_states", "return_final_states", "seq_idx", "cu_seqlens")
    dt = _time_step(dt, dt_bias, dt_softplus)
    low, high = (float(limit) for limit in dt_limit)
    if low > 0 or not dt_softplus:
        dt = torch.clamp(dt, min=low)
    if high != float("inf"):
        dt = torch.clamp(dt, max=high)
    out = torch.ops.icc_trace.gated_scan(C, B, hidden_states, dt * A, dt, False)
    if D is not None:
        out = out + hidden_states * (D[:, None] if D.dim() == 1 else D)
    return out if z is None else out * functional.silu(z)


def selective_scan_fn(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Mamba's scan of the package mamba_ssm: hidden_states, dt[1, C, T], A[C, N], B, C[1, N, T]."""
    _refuse("selective_scan_fn", kwargs, "return_last_state")
    dt = _time_step(dt, None if delta_bias is None else delta_bias[:, None], delta_softplus)
    out = torch.ops.icc_trace.selective_scan(hidden_states, dt, A, B, C)
    if D is not None:
        out = out + hidden_states * D[:, None]
    return out if z is None else out * functional.silu(z)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "chunk_gated_delta_rule": delta_rule,
    "chunk_kda": delta_rule,
    "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
    "selective_scan_fn": selective_scan_fn,
}


@contextlib.contextmanager
def recurrent_functions(model: nn.Module) -> Iterator[None]:
    """Ours in the place of those that the modules of `model` call."""
    files = {type(module).__module__ for module in model.modules()}
    with contextlib.ExitStack() as stack:
        for file in sorted(files & sys.modules.keys()):
            for name, function in list(vars(sys.modules[file]).items()):
                ours = FUNCTIONS.get(_kernel(function)) if inspect.isfunction(function) else None
                if ours is not None:
                    stack.enter_context(mock.patch.object(sys.modules[file], name, ours))
        yield


@cache
def _kernel(function: Callable[..., Any]) -> str:
    """The name of the kernel that may stand in for a function, as its decorator says; "" if there is none."""
    if not hasattr(function, "__wrapped__"):
        return ""
    try:
        source = inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""
    found = _DECORATOR.match(source)
    return found[1] if found else ""


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    from transformers.activations import ACT2FN

    return ACT2FN[name]


def _unit(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + eps), as the norm that it is."""
    width = x.shape[-1]
    return functional.rms_norm(x, (width,), None, _EPS / width) * width**-0.5


def _time_step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias
    return functional.softplus(dt) if softplus else dt


def _refuse(function: str, options: dict[str, Any], *names: str) -> None:
    for name in names:
        if options.get(name) is not None and options[name] is not False:
            raise UnsupportedModel(f"{function} with {name} is not supported", op=function)
