"""Recognises linear attention that a modeling file writes out in blocks of tokens: lightning attention (Qin et al.
2024), whose heads each have a state that decays at a rate of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedModel
from .substitution import Candidate, CodeTrial, Substitution, small_copy
from .traced_ops import COMPUTED, TRACED, SequenceOps

_TOKENS, _BLOCK, _WIDTH = 7, 3, 2  # sizes of the small copy
_TAKES = ("hidden_states", "position_embeddings", "attention_mask", "past_key_values")


def lightning_attention(ops: SequenceOps, module: Any, hidden_states: Tensor) -> Tensor:
    """gate(x) * norm(scan(act(qkv(x)))): hidden_states[1, T, H] -> [1, T, H]. Per head, S <- exp(-rate) S + k v^T and
    the result is S^T q."""
    heads, width = module.num_attention_heads, module.head_dim
    shape = hidden_states.shape[:2]
    qkv = module.act_fn(module.qkv_proj(hidden_states)).reshape(*shape, heads, 3 * width)
    q, k, v = torch.split(qkv, width, dim=3)
    decay = (-module.slope_rate).reshape(1, 1, heads).expand(*shape, heads)
    out = module.norm(ops.gated(q, k, v, decay, None, False).reshape(*shape, heads * width))
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * out)


def _traced(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    given = dict(zip(_TAKES[1:], args, strict=False)) | kwargs
    for name in ("attention_mask", "past_key_values"):
        if given.get(name) is not None:
            raise UnsupportedModel(f"linear attention with {name} is not supported", op="gated_scan")
    return lightning_attention(TRACED, self, hidden_states)


def _small(candidate: Candidate, generator: torch.Generator) -> Iterator[CodeTrial]:
    module = candidate.module
    heads, width, hidden = module.num_attention_heads, module.head_dim, module.out_proj.weight.shape[0]
    inner = heads * _WIDTH
    small = small_copy(module, {hidden: inner, heads * width: inner, 3 * heads * width: 3 * inner}, generator)
    small.head_dim, small.block_size, small.num_attention_heads = _WIDTH, _BLOCK, heads
    small.slope_rate = torch.rand(heads, 1, 1, generator=generator)
    factors: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] = small.decay_factors
    small.query_decay, small.key_decay, small.diagonal_decay = factors(small.slope_rate)
    x = torch.randn(1, _TOKENS, inner, generator=generator)
    yield CodeTrial(lambda: small(x, None, None), (COMPUTED, small, x))


LIGHTNING = Substitution(
    find=lambda candidate: candidate.name == "forward" and hasattr(candidate.module, "slope_rate"),
    small=_small,
    reference=lightning_attention,
    replacement=lambda candidate: {"forward": _traced},
)
