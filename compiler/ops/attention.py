"""Attention, causal or not, without and with the paged KV cache, and rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .attention_spec import ALL_AHEAD, AttentionMask, AttentionSpec
from .base import Cost, op, tensor_bytes
from .evicting import attend_evicting
from .traits import Division, Traits

BIAS_MARGIN = 64  # extra columns of a bias by distance, beyond the longest sequence, that kernels may read


_HEADS = Division(dict.fromkeys(("q", "k", "v", "sinks", "alibi", "bias", "row_bias", "key_bias"), 0), 0)


@op(Traits(mixes_tokens=True, stateful=True, attention=True, weights=(4, 5, 6), abstract=True, divisions=(_HEADS,)))
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    row_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence: q[T, Hq, D], k[T, Hkv, D], v[T, Hkv, Dv] -> [T, Hq, Dv], Hq a multiple of Hkv.

    If the mask sees later tokens, the whole sequence must be in one step, and nothing of it is cached, unless
    `spec.cached`. sinks[Hq] add exp(sink) to the denominator. alibi[Hq] adds slope * (key position - query position).
    bias[Hq, 2 * P] adds column P + key position - query position, where P is at least the longest sequence and
    BIAS_MARGIN. row_bias[T, Hq, E], or [T, 1, E] for all heads, adds column `spec.later` + query position - key
    position of the query's own row, or 0 if there is no such column. key_bias, with `spec.key_later`, does the same
    with the key's own row, if the mask sees all later tokens (c2p and p2c of DeBERTa, He et al. 2021).
    """
    tokens, heads, _ = q.shape
    if q.device.type == "meta":
        return q.new_empty(tokens, heads, v.shape[2])
    positions = torch.arange(tokens)
    scores = _scores(q, k, positions, spec, alibi, bias)
    if row_bias is not None:
        scores = scores + by_distance(row_bias, spec.later)
    if key_bias is not None:
        scores = scores + by_distance(key_bias, spec.key_later, of_keys=True)
    return _weighted(scores.masked_fill(~spec.mask.visible(positions), float("-inf")), v, sinks)


def _scores(q: Tensor, k: Tensor, at: Tensor, spec: AttentionSpec, alibi: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scores [Hq, T, T] of q and k as in `attention`, before masking. at [T]: the positions of q from which distances
    are counted."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(0, 1)
    scores = q.transpose(0, 1) @ keys.transpose(1, 2) * spec.scale
    distance = torch.arange(len(k))[None, :] - at[:, None]
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if alibi is not None:
        scores = scores + alibi[:, None, None] * distance
    return scores if bias is None else scores + bias[:, bias.shape[1] // 2 + distance]


def by_distance(rows: Tensor, later: int, of_keys: bool = False) -> Tensor:
    """[H, T, T] from rows[T, H, E] of queries, or of keys: the entry of a pair is column `later` + query - key, or 0 if
    there is no such column."""
    tokens, heads, width = rows.shape
    at = torch.arange(tokens)
    column = later + at[:, None] - at[None, :]
    own = column.clamp(0, width - 1).expand(heads, -1, -1)
    by_head = rows.transpose(0, 1)
    found = by_head.gather(2, own.mT).mT if of_keys else by_head.gather(2, own)
    return found.masked_fill((column < 0) | (column >= width), 0.0)


def _weighted(scores: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """[T, Hq, Dv]: values weighted by the softmax of scores [Hq, T, T]."""
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

    yield *qkv(1, 2, 1, 16, 16), AttentionSpec(0, 0.25)
    yield *qkv(19, 6, 2, 40, 24), AttentionSpec(0, 0.2, AttentionMask(window=5))
    yield *qkv(9, 3, 3, 8, 8), AttentionSpec(0, 0.3, softcap=20.0), torch.randn(3)
    yield *qkv(9, 4, 2, 8, 8), AttentionSpec(0, 0.3, AttentionMask(chunk=4)), None, torch.rand(4)
    around, every = AttentionMask(window=3, ahead=2), AttentionMask(ahead=ALL_AHEAD)
    yield *qkv(21, 4, 2, 8, 8), AttentionSpec(0, 0.3, around)  # as many tokens as the tests run, so that all are seen
    yield *qkv(21, 4, 4, 8, 8), AttentionSpec(0, 0.3, every), None, None, torch.randn(4, 160)
    yield *qkv(21, 4, 2, 8, 8), AttentionSpec(0, 0.3), None, None, None, torch.randn(21, 4, 7)
    yield *qkv(21, 4, 2, 8, 8), AttentionSpec(0, 0.3), None, None, None, torch.randn(21, 1, 20)
    both = AttentionSpec(0, 0.3, every, later=20, key_later=3)
    yield *qkv(21, 4, 2, 8, 8), both, None, None, None, torch.randn(21, 4, 41), torch.randn(21, 4, 13)


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


@op(Traits(divisions=(Division({"x": 0}, 0),)))
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


@op(
    Traits(
        mixes_tokens=True, stateful=True, attention=True, product=(0, 1, 2), weights=(5, 6, 7, 8, 9, 10, 11),
        divisions=(_HEADS,),
    )
)  # fmt: skip
def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    spec: AttentionSpec,
    q_cos: Tensor | None = None,
    q_sin: Tensor | None = None,
    k_cos: Tensor | None = None,
    k_sin: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    row_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Attention over the paged KV cache with rotary embedding and KV write fused.

    As `attention`, but q and k are first rotated by the rows `positions` of the tables q_cos/q_sin and k_cos/k_sin [P,
    R] (None: no rotation), and k, v are written to the pages of KV layer `spec.layer`. The reference sees one sequence
    whose tokens are all in this step; `spec.policy` decides which earlier tokens a token sees.
    """
    tokens, heads, _ = q.shape
    if q.device.type == "meta":
        return q.new_empty(tokens, heads, v.shape[2])

    def turned(places: Tensor) -> Tensor:
        return q if q_cos is None or q_sin is None else rotate(q, q_cos[places], q_sin[places], spec.rope)

    if k_cos is not None and k_sin is not None:
        k = rotate(k, k_cos[positions], k_sin[positions], spec.rope)
    policy = spec.policy
    if policy is None:
        return attention.reference(turned(positions), k, v, spec, sinks, alibi, bias, row_bias, key_bias)
    at = torch.arange(tokens)
    if policy.chooses:
        return attend_evicting(_scores(turned(at), k, at, spec, alibi, bias), v, sinks, policy)
    first, window = policy.beside, policy.size
    near = _scores(turned(at), k, at, spec, alibi, bias)
    based = at.clamp(max=first + window - 1)  # a query's position if no tokens were missing
    far = _scores(turned(based), k, based, spec, alibi, bias)
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
    at, every = torch.arange(t), AttentionMask(ahead=ALL_AHEAD)
    yield q, k, v, at, AttentionSpec(0, 0.25), *tables
    yield q, k, v, at, AttentionSpec(0, 0.25, AttentionMask(window=7)), None, None, None, None, torch.randn(4)
    yield q, k, v, at, AttentionSpec(0, 0.25, AttentionMask(window=5, ahead=4)), *tables
    yield q, k, v, at, AttentionSpec(0, 0.0, every), *tables, None, None, torch.randn(4, 192)
    yield q, k, v, at, AttentionSpec(0, 0.25), *tables, None, None, None, torch.randn(t, 4, 9)
    both = AttentionSpec(0, 0.25, every, later=5, key_later=20)
    yield q, k, v, at, both, *tables, None, None, None, torch.randn(t, 4, 11), torch.randn(t, 4, 41)
