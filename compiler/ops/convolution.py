"""The short causal convolution along the tokens: its state is the last few inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .base import Cost, op, tensor_bytes
from .traits import Division, Traits

_CHANNELS = Division({"x": 0, "weight": 1, "bias": 0}, 0)


@op(Traits(mixes_tokens=True, stateful=True, weights=(1, 2), divisions=(_CHANNELS,)))
def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, layer: int) -> Tensor:
    """y[t] = bias + sum over k of weight[k] * x[t - K + 1 + k], channel by channel: x[T, C], weight[K, C] -> [T, C].

    Inputs before the first token count as 0, and so does a bias of None. `layer` numbers the state, the last K - 1
    inputs.
    """
    if x.device.type == "meta":
        return torch.empty_like(x)
    taps = weight.shape[0]
    padded = torch.cat([x.new_zeros(taps - 1, x.shape[1]), x])
    y = torch.zeros_like(x) if bias is None else bias.expand_as(x).clone()
    for tap in range(taps):
        y += weight[tap] * padded[tap : tap + x.shape[0]]
    return y


@causal_conv.set_cost
def _causal_conv_cost(x: Tensor, weight: Tensor, *rest: object) -> Cost:
    return Cost(2.0 * x.numel() * weight.shape[0], 2 * tensor_bytes(x) + tensor_bytes(weight))


@causal_conv.set_samples
def _causal_conv_samples() -> Iterator[tuple[object, ...]]:
    yield torch.randn(1, 8), torch.randn(3, 8), None, 0
    yield torch.randn(9, 21), torch.randn(4, 21), torch.randn(21), 0
