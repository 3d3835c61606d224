"""Attention, causal or not, before and after it meets the paged KV cache, and rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..eviction import read_eviction
from .base import Cost, op, tensor_bytes
from .evicting import attend_evicting
from .traits import Traits

ALL_AHEAD = -1  # every later token of the sequence
BIAS_MARGIN = 64  # columns of a bias by distance beyond the longest sequence, which kernels may read


def visible(positions: Tensor, window: int, chunk: int, ahead: int = 0) -> Tensor:
    """Boolean [T, T]: may the query at positions[i] attend to the key at positions[j]?"""
    q, k = positions[:, None], positions[None, :]
    allowed = torch.ones_like(k <= q) if ahead == ALL_AHEAD else k <= q + ahead
    if window:
        allowed = allowed & (k > q - window)
    if chunk:
        allowed = allowed & (k // chunk == q // chunk)
    return allowed


@op(Traits(mixes_tokens=True, stateful=True, attention=True, weights=(3, 4, 11), abstract=True))
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi: Tensor | None,
    layer: int,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    ahead: int = 0,
    bias: Tensor | None = None,
    row_bias: Tensor | None = None,
    later: int = 0,
    key_bias: Tensor | None = None,
    key_later: int = 0,
) -> Tensor:
    """Attention of one sequence: q[T, Hq, D], k[T, Hkv, D], v[T, Hkv, Dv] -> [T, Hq, Dv], Hq a multiple of Hkv.

    window: keys further back are not seen (0: all). chunk: only keys of the query's own chunk are seen (0: all).
    ahead: how many of the later keys are seen too (0: none, causal; ALL_AHEAD: all); then the whole sequence must be in
    one step, and nothing of it is kept. softcap: scores become softcap * tanh(score / softcap). sinks[Hq] add exp(sink)
    to the denominator. alibi[Hq] adds slope * (key position - query position). bias[Hq, 2 * P] adds column
    P + key position - query position, where P is at least the longest sequence and BIAS_MARGIN. row_bias[T, Hq, E], or
    [T, 1, E] for all heads, adds column `later` + query position - key position of the query's own row, and nothing
    where there is no such column. key_bias and key_later are the same of the key's own row, where `ahead` has the whole
    sequence in one step (c2p and p2c of DeBERTa, He et al. 2021).
    `layer` numbers the KV cache. Scale 0 weighs all that is seen alike: a mean of values.
    """
    tokens, heads, _ = q.shape
    if q.device.type == "meta":
        return q.new_empty(tokens, heads, v.shape[2])
    positions = torch.arange(tokens)
    scores = _scores(q, k, positions, alibi, scale, softcap, bias)
    if row_bias is not None:
        scores = scores + by_distance(row_bias, later)
    if key_bias is not None:
        scores = scores + by_distance(key_bias, key_later, of_keys=True)
    return _weighted(scores.masked_fill(~visible(positions, window, chunk, ahead), float("-inf")), v, sinks)


def _scores(
    q: Tensor, k: Tensor, at: Tensor, alibi: Tensor | None, scale: float, softcap: float, bias: Tensor | None
) -> Tensor:
    """[Hq, T, T] of q and k as `attention` has them, before anything is hidden. at [T]: where distances of q count
    from."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(0, 1)
    scores = q.transpose(0, 1) @ keys.transpose(1, 2) * scale
    distance = torch.arange(len(k))[None, :] - at[:, None]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi is not None:
        scores = scores + alibi[:, None, None] * distance
    return scores if bias is None else scores + bias[:, bias.shape[1] // 2 + distance]


def by_distance(rows: Tensor, later: int, of_keys: bool = False) -> Tensor:
    """[H, T, T]: rows[T, H, E] of queries, or of keys, laid out: column `later` + query - key, zeros where there is
    none."""
    tokens, heads, width = rows.shape
    at = torch.arange(tokens)
    column = later + at[:, None] - at[None, :]
    own = column.clamp(0, width - 1).expand(heads, -1, -1)
    by_head = rows.transpose(0, 1)
    found = by_head.gather(2, own.mT).mT if of_keys else by_head.gather(2, own)
    return found.masked_fill((column < 0) | (column >= width), 0.0)


def _weighted(scores: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """[T, Hq, Dv]: values by softmax of scores [Hq, T, T]."""
    heads, tokens, _ = scores.shape
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(heads, tokens, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :tokens]
    values = v.repeat_interleave(heads // v.shape[1], dim=1).transpose(0, 1)
    return (weights @ values).transpose(0, 1).contiguous()


@attention.set_cost
def _attention_cost(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Cost:
    return Cost(2.0 * q.numel() * k.shape[0] * 2, tensor_bytes(q, k, v))


@attention.set_samples
def _attention_samples() -> Iterator[tuple[object, ...]]:
    def qkv(t: int, hq: int, hkv: int, d: int, dv: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.randn(t, hq, d), torch.randn(t, hkv, d), torch.randn(t, hkv, dv)

    yield *qkv(1, 2, 1, 16, 16), None, None, 0, 0.25, 0, 0, 0.0
    yield *qkv(19, 6, 2, 40, 24), None, None, 0, 0.2, 5, 0, 0.0
    yield *qkv(9, 3, 3, 8, 8), torch.randn(3), None, 0, 0.3, 0, 0, 20.0
    yield *qkv(9, 4, 2, 8, 8), None, torch.rand(4), 0, 0.3, 0, 4, 0.0
    yield *qkv(21, 4, 2, 8, 8), None, None, 0, 0.3, 3, 0, 0.0, 2  # as many tokens as the tests run: all are seen
    yield *qkv(21, 4, 4, 8, 8), None, None, 0, 0.3, 0, 0, 0.0, ALL_AHEAD, torch.randn(4, 160)
    yield *qkv(21, 4, 2, 8, 8), None, None, 0, 0.3, 0, 0, 0.0, 0, None, torch.randn(21, 4, 7), 0
    yield *qkv(21, 4, 2, 8, 8), None, None, 0, 0.3, 0, 0, 0.0, 0, None, torch.randn(21, 1, 20), 0
    both = torch.randn(21, 4, 41), 20, torch.randn(21, 4, 13), 3
    yield *qkv(21, 4, 2, 8, 8), None, None, 0, 0.3, 0, 0, 0.0, ALL_AHEAD, None, *both


def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Rotary embedding of the first R = cos.shape[-1] dims of x[T, H, D] by cos, sin[T, R]; the rest passes through.

    style "half" pairs dim i with i + R/2 (GPT-NeoX), "interleaved" pairs 2i with 2i + 1 (GPT-J; Su et al. 2021).
    """
    r = cos.shape[-1]
    head, tail = x[..., :r], x[..., r:]
    if style == "half":
        turned = torch.cat((-head[..., r // 2 :], head[..., : r // 2]), dim=-1)
    else:
        turned = torch.stack((-head[..., 1::2], head[..., ::2]), dim=-1).flatten(-2)
    return torch.cat((head * cos[:, None] + turned * sin[:, None], tail), dim=-1)


@op()
def rope(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Rotary position embedding, see `rotate`: x[T, H, D], cos and sin [T, R] with R <= D."""
    return rotate(x, cos, sin, style).clone()


@rope.set_cost
def _rope_cost(x: Tensor, *rest: object) -> Cost:
    return Cost(3.0 * x.numel(), 2 * tensor_bytes(x))


@rope.set_samples
def _rope_samples() -> Iterator[tuple[Tensor, Tensor, Tensor, str]]:
    yield torch.randn(3, 2, 16), torch.randn(3, 16), torch.randn(3, 16), "half"
    yield torch.randn(3, 2, 24), torch.randn(3, 8), torch.randn(3, 8), "half"
    yield torch.randn(3, 1, 8), torch.randn(3, 8), torch.randn(3, 8), "interleaved"


@op(Traits(mixes_tokens=True, stateful=True, attention=True, product=(0, 1, 2), weights=(4, 5, 6, 7, 8, 9, 17)))
def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    q_cos: Tensor | None,
    q_sin: Tensor | None,
    k_cos: Tensor | None,
    k_sin: Tensor | None,
    sinks: Tensor | None,
    alibi: Tensor | None,
    layer: int,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    rope_style: str,
    ahead: int = 0,
    bias: Tensor | None = None,
    row_bias: Tensor | None = None,
    later: int = 0,
    key_bias: Tensor | None = None,
    key_later: int = 0,
    policy: str = "all",
) -> Tensor:
    """Attention over the paged KV cache with rotary embedding and KV write fused.

    As `attention`, where q and k are first rotated by the rows `positions` of the tables q_cos/q_sin and k_cos/k_sin
    [P, R] (absent: no rotation), and k, v are written to the pages of KV layer `layer`. The reference sees one sequence
    whose tokens are all in this step. policy: what is kept of the tokens before, see compiler/eviction.py.
    """
    tokens, heads, _ = q.shape
    if q.device.type == "meta":
        return q.new_empty(tokens, heads, v.shape[2])

    def turned(places: Tensor) -> Tensor:
        return q if q_cos is None or q_sin is None else rotate(q, q_cos[places], q_sin[places], rope_style)

    if k_cos is not None and k_sin is not None:
        k = rotate(k, k_cos[positions], k_sin[positions], rope_style)
    evicting = read_eviction(policy)
    if evicting is None:
        return attention.reference(
            turned(positions), k, v, sinks, alibi, layer, scale, window, chunk, softcap, ahead, bias, row_bias, later,
            key_bias, key_later,
        )  # fmt: skip
    at = torch.arange(tokens)
    if evicting.chooses:
        return attend_evicting(_scores(turned(at), k, at, alibi, scale, softcap, bias), v, sinks, evicting)
    first, window = evicting.beside, evicting.size
    near = _scores(turned(at), k, at, alibi, scale, softcap, bias)
    based = at.clamp(max=first + window - 1)  # where a query would be if nothing was missing
    far = _scores(turned(based), k, based, alibi, scale, softcap, bias)
    is_sink = at[None, :] < first
    seen = (at[None, :] <= at[:, None]) & (is_sink | (at[None, :] > at[:, None] - window))
    return _weighted(torch.where(is_sink, far, near).masked_fill(~seen, float("-inf")), v, sinks)


@paged_attention.set_cost
def _paged_cost(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Cost:
    return Cost(2.0 * q.numel() * k.shape[0] * 2, 2 * tensor_bytes(q, k, v))


@paged_attention.set_samples
def _paged_samples() -> Iterator[tuple[object, ...]]:
    t, d, r = 21, 16, 8
    tables = [torch.randn(32, r) for _ in range(2)] * 2
    q, k, v = torch.randn(t, 4, d), torch.randn(t, 2, d), torch.randn(t, 2, d)
    yield q, k, v, torch.arange(t), *tables, None, None, 0, 0.25, 0, 0, 0.0, "half"
    yield q, k, v, torch.arange(t), None, None, None, None, torch.randn(4), None, 0, 0.25, 7, 0, 0.0, "half"
    yield q, k, v, torch.arange(t), *tables, None, None, 0, 0.25, 5, 0, 0.0, "half", 4
    yield q, k, v, torch.arange(t), *tables, None, None, 0, 0.0, 0, 0, 0.0, "half", ALL_AHEAD, torch.randn(4, 192)
    yield q, k, v, torch.arange(t), *tables, None, None, 0, 0.25, 0, 0, 0.0, "half", 0, None, torch.randn(t, 4, 9), 0
    biases = None, torch.randn(t, 4, 11), 5, torch.randn(t, 4, 41), 20
    yield q, k, v, torch.arange(t), *tables, None, None, 0, 0.25, 0, 0, 0.0, "half", ALL_AHEAD, *biases
