"""The ops that replace code of a model in a trace, and the same recurrences computed with numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops import OPS

NAME = "icc"  # name of the implementation in transformers' registries, and of the namespace of traced ops
ops = torch.ops.icc_trace


def traced(fake: Callable[..., Tensor]) -> None:
    """Declare the op icc_trace::<function name>; the function makes a result [..] of its shape. The op can be traced
    but not run."""
    name = f"{NAME}_trace::{fake.__name__}"
    torch.library.define(name, torch.library.infer_schema(fake, mutates_args=()))
    torch.library.register_fake(name, fake)


@traced
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    ahead: int,
    bias: Tensor | None = None,
    index: Tensor | None = None,
    picked: int = 0,
) -> Tensor:
    """icc::attention as the models call it: q[1, Hq, T, D], k[1, Hkv, T, D], v[1, Hkv, T, Dv] -> [1, T, Hq, Dv].

    bias[.., T, T] is added to the scores; sinks[Hq] are one further score per head, without a key. None: no bias, no
    sinks. index[1, T, T]: only the `picked` visible keys with the highest values are read; None: all.
    """
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


@traced
def expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor) -> Tensor:
    """As icc::expert_linear: x[T, K] or [T, S, K], weight[E, N, K], bias[E, N] or None, index[T, S] -> [T, S, N]."""
    return x.new_empty(index.shape[0], index.shape[1], weight.shape[1])


@traced
def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """icc::causal_conv as the models call it: x[1, C, T], weight[C, K], bias[C] or None -> [1, C, T]."""
    return torch.empty_like(x)


@traced
def gated_scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, delta: bool) -> Tensor:
    """icc::gated_scan as the models call it: q, k[1, T, Hk, K], v[1, T, H, V], decay[1, T, H] or [1, T, H, K], and
    beta[1, T, H] or None for 1."""
    return torch.empty_like(v)


@traced
def selective_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """icc::selective_scan as the models call it: x, dt[1, C, T], a[C, N], b, c[1, N, T] -> [1, C, T]."""
    return torch.empty_like(x)


@traced
def channel_scan(x: Tensor, decay: Tensor | None, maximum: bool, start: float) -> Tensor:
    """icc::channel_scan of one sequence: x, decay[1, T, C] or None -> [1, T, C]."""
    return torch.empty_like(x)


@dataclass(frozen=True)
class SequenceOps:
    """The ops that replacements call: either TRACED or COMPUTED. Signatures are those of the functions above; `product`
    is `expert_linear` without a bias."""

    product: Callable[[Tensor, Tensor, Tensor], Tensor]
    conv: Callable[..., Tensor]
    gated: Callable[..., Tensor]
    selective: Callable[..., Tensor]
    channel: Callable[..., Tensor]


def _computed(name: str, tokens_last: bool = False) -> Callable[..., Tensor]:
    """The reference of an icc op for one sequence [1, T, ..]. tokens_last: values are [1, .., T], and weights are
    transposed, [C, K] for [K, C]."""

    def rows(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value[0] if value.dim() == 3 or not tokens_last else value
        return value.mT if tokens_last and value.dim() == 2 else value

    def run(*args: Any) -> Tensor:
        out = OPS[name].reference(*(rows(a) for a in args), 0)
        return (out.mT if tokens_last else out)[None]

    return run


TRACED = SequenceOps(
    lambda x, weight, index: ops.expert_linear(x, weight, None, index),
    lambda *args: ops.causal_conv(*args),
    lambda *args: ops.gated_scan(*args),
    lambda *args: ops.selective_scan(*args),
    lambda *args: ops.channel_scan(*args),
)
COMPUTED = SequenceOps(
    lambda x, weight, index: OPS["expert_linear"].reference(x, weight, None, index),
    _computed("causal_conv", tokens_last=True),
    _computed("gated_scan"),
    _computed("selective_scan", tokens_last=True),
    _computed("channel_scan"),
)
