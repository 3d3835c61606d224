"""The reference of attention that evicts tokens by the attention they got, computed one token after the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from ..eviction import Eviction

# Tokens over which the maximum score is taken (SnapKV's clustering), so that a token's neighbours are kept with it.
# Wider than the paper's 5 or 7: a question attends to the beginning of its answer, and numbers have a token per digit
# (benchmarks/NOTES.md).
POOLED = 15


def attend_evicting(
    scores: Tensor, v: Tensor, sinks: Tensor | None, policy: Eviction, prompt: int | None = None
) -> Tensor:
    """The result [T, Hq, Dv] from scores [Hq, T, T] of `paged_attention` before masking, and v [T, Hkv, Dv].

    prompt: how many of the tokens are the prompt; None: all. Of equal scores the earlier tokens are kept.
    """
    heads, tokens, _ = scores.shape
    prompt = tokens if prompt is None else prompt
    kv_heads = v.shape[1]
    group = heads // kv_heads
    out = v.new_zeros(tokens, heads, v.shape[2])
    for kv_head in range(kv_heads):
        kept: list[int] = []
        got = torch.zeros(tokens, dtype=torch.float64)
        own = slice(kv_head * group, (kv_head + 1) * group)
        for token in range(tokens):
            kept.append(token)
            row = scores[own, token][:, kept]
            if sinks is not None:
                row = torch.cat([row, sinks[own, None]], dim=-1)
            weights = torch.softmax(row, dim=-1)[:, : len(kept)]
            out[token, own] = weights @ v[kept, kv_head]
            if policy.kind == "h2o" or prompt - policy.beside <= token < prompt:
                got[kept] += weights.sum(0).double()
            kept = _left(kept, got, policy, token + 1 == prompt)
    return out


def _left(kept: list[int], got: Tensor, policy: Eviction, at_end: bool) -> list[int]:
    """The tokens of `kept` that stay in the cache after the last of them."""
    if policy.kind == "h2o":
        most = policy.size - policy.size // 8 if len(kept) == policy.size else len(kept)
    else:
        most = policy.size if at_end else len(kept)
    if len(kept) <= most:
        return kept
    older, recent = kept[: -policy.beside], kept[-policy.beside :]
    marks = got[older]
    if policy.kind == "snapkv":
        marks = max_pool1d(marks[None, None], POOLED, 1, POOLED // 2)[0, 0]
    order = torch.argsort(marks, descending=True, stable=True)[: most - policy.beside]
    return [older[i] for i in sorted(order.tolist())] + recent
