"""Recurrences along the tokens: with a matrix per head as the state (linear attention, delta rules, state spaces), a
vector per channel (Mamba), or a number per channel.

A token's update of a matrix is linear in the matrix, so a back end may process tokens one by one or in chunks of
products; the references process them one by one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .base import Cost, op, tensor_bytes
from .traits import Division, Traits

_HEADS = Division(dict.fromkeys(("q", "k", "v", "decay", "beta"), 0), 0)


@op(Traits(mixes_tokens=True, stateful=True, divisions=(_HEADS,)))
def gated_scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, delta: bool, layer: int) -> Tensor:
    """q, k[T, Hk, K], v[T, H, V] -> [T, H, V]; head h has the queries and keys of head h // (H / Hk).

    Per head and token, from S = 0 [K, V]:
        S <- exp(decay) S        decay[T, H], or [T, H, K]: one for each row
        u  = beta v              beta[T, H], or 1 for None; with `delta` u = beta (v - S^T k)
        S <- S + k u^T
        o  = S^T q
    With `delta` this is the gated delta rule (Yang et al. 2024) or, with a decay per row, Kimi delta attention; without
    it Mamba-2's state space duality (Dao and Gu 2024: k = B, q = C, beta = dt) and lightning attention. `layer` numbers
    the state.
    """
    if v.device.type == "meta":
        return torch.empty_like(v)
    tokens, heads, width = v.shape
    share = heads // k.shape[1]
    q, k = (x.repeat_interleave(share, dim=1) for x in (q, k))
    rows = torch.exp(decay if decay.dim() == 3 else decay[..., None])
    state, out = v.new_zeros(heads, k.shape[2], width), torch.empty_like(v)
    for t in range(tokens):
        state = state * rows[t][..., None]
        update = v[t] - torch.einsum("hkv,hk->hv", state, k[t]) if delta else v[t]
        if beta is not None:
            update = update * beta[t][:, None]
        state = state + k[t][..., None] * update[:, None]
        out[t] = torch.einsum("hkv,hk->hv", state, q[t])
    return out


@gated_scan.set_cost
def _gated_scan_cost(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, delta: bool, layer: int
) -> Cost:
    flops = 2.0 * v.numel() * k.shape[2] * (3 if delta else 2) + v.numel() * k.shape[2]
    state = 4 * v.shape[1] * v.shape[2] * k.shape[2]
    return Cost(flops, tensor_bytes(q, k, v, v, decay, beta) + 2 * state)


@gated_scan.set_samples
def _gated_scan_samples() -> Iterator[tuple[object, ...]]:
    def inputs(t: int, shared: int, heads: int, k: int, v: int, rows: bool) -> tuple[Tensor, ...]:
        keys = torch.nn.functional.normalize(torch.randn(t, shared, k), dim=-1)
        decay = -torch.rand(t, heads, k) if rows else -torch.rand(t, heads)
        return torch.randn(t, shared, k), keys, torch.randn(t, heads, v), decay, torch.rand(t, heads)

    yield *inputs(1, 1, 1, 8, 8, False), True, 0
    yield *inputs(9, 2, 4, 16, 24, False), True, 0
    yield *inputs(11, 3, 3, 9, 21, True), True, 0
    yield *inputs(13, 1, 4, 24, 40, False), False, 0
    q, k, v, decay, _ = inputs(7, 2, 2, 16, 16, False)
    yield q, k, v, decay, None, False, 0


@op(Traits(mixes_tokens=True, stateful=True, weights=(2,), divisions=(Division({"x": 0, "dt": 0, "a": 1}, 0),)))
def selective_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, layer: int) -> Tensor:
    """x, dt[T, C], a[N, C], b, c[T, N] -> [T, C]: Mamba's selective scan (Gu and Dao 2023).

    Per channel and token, from s = 0 [N]: s <- exp(dt a) s + dt x b; y = s . c. `layer` numbers the state.
    """
    if x.device.type == "meta":
        return torch.empty_like(x)
    state, out = x.new_zeros(a.shape), torch.empty_like(x)
    for t in range(x.shape[0]):
        state = torch.exp(dt[t] * a) * state + (dt[t] * x[t]) * b[t][:, None]
        out[t] = (state * c[t][:, None]).sum(0)
    return out


@selective_scan.set_cost
def _selective_scan_cost(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, layer: int) -> Cost:
    return Cost(8.0 * x.numel() * a.shape[0], tensor_bytes(x, x, dt, a, b, c) + 2 * tensor_bytes(a))


@selective_scan.set_samples
def _selective_scan_samples() -> Iterator[tuple[object, ...]]:
    for t, channels, states in ((1, 8, 4), (9, 21, 16)):
        x, dt, a = torch.randn(t, channels), torch.rand(t, channels), -torch.rand(states, channels) * 4
        yield x, dt, a, torch.randn(t, states), torch.randn(t, states), 0


@op(Traits(mixes_tokens=True, stateful=True, divisions=(Division({"x": 0, "decay": 0}, 0),)))
def channel_scan(x: Tensor, decay: Tensor | None, maximum: bool, start: float, layer: int) -> Tensor:
    """x, decay[T, C] -> [T, C]: the state, a number per channel, before each token; `start` before the first.

    Per channel and token: h <- decay h + x, with `maximum` h <- max(decay + h, x), without a decay (None) h <- x. This
    covers gated linear recurrences (RG-LRU, De et al. 2024), and with a running maximum of exponents those of RWKV
    (Peng et al. 2023) and xLSTM (Beck et al. 2024); the state after a token follows from the state before it. `layer`
    numbers the state.
    """
    if x.device.type == "meta":
        return torch.empty_like(x)
    state, out = torch.full_like(x[0], start), torch.empty_like(x)
    for t in range(x.shape[0]):
        out[t] = state
        if decay is None:
            state = x[t]
        else:
            state = torch.maximum(decay[t] + state, x[t]) if maximum else decay[t] * state + x[t]
    return out


@channel_scan.set_cost
def _channel_scan_cost(x: Tensor, decay: Tensor | None, maximum: bool, start: float, layer: int) -> Cost:
    return Cost(2.0 * x.numel(), tensor_bytes(x, x, decay) + 2 * 4 * x.shape[1])


@channel_scan.set_samples
def _channel_scan_samples() -> Iterator[tuple[object, ...]]:
    yield torch.randn(1, 8), torch.rand(1, 8), False, 0.0, 0
    yield torch.randn(9, 21), torch.rand(9, 21), False, 0.0, 0
    yield torch.randn(9, 21), -torch.rand(9, 21), True, -1e38, 0
    yield torch.randn(7, 16), None, False, 0.0, 0
