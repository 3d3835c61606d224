"""Modules that select the tokens that attention reads for each query. They are dropped if the longest sequence is so
short that they select all tokens.

Qwen4's indexer selects the best blocks of tokens, by one key per block, and the tokens after the last whole block. As a
check, a small copy of the module must select every token that the mask allows at this length, and not at one token
more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..mask_spec import AllVisible, MaskSpec, MaskUsed, picking
from .substitution import Candidate, CodeTrial, Substitution, small_copy

_BLOCKS, _PER_BLOCK, _WIDTH = 2, 4, 8  # sizes of the small copy


def _most(blocks: int, per_block: int) -> int:
    """The length in tokens of the longest sequence of which all tokens are selected."""
    return (blocks + 1) * per_block - 1


def _small(candidate: Candidate, generator: torch.Generator) -> Iterator[CodeTrial]:
    module = candidate.module
    small = small_copy(module, {module.index_qk_proj.in_features: _WIDTH}, generator)
    small.block_topk, small.compress_ratio, small.token_budget = _BLOCKS, _PER_BLOCK, _BLOCKS * _PER_BLOCK
    most = _most(_BLOCKS, _PER_BLOCK)
    for tokens in (most, most + 1):
        x = torch.randn(1, tokens, _WIDTH, generator=generator)
        angles = torch.rand(1, tokens, small.index_head_dim, generator=generator)
        mask = torch.full((1, 1, tokens, tokens), torch.finfo(torch.float32).min).triu(1)
        given = (x, (angles.cos(), angles.sin()), mask, None)
        yield CodeTrial(lambda given=given: small(*given), (mask,), same=tokens == most)


def _traced(self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, *rest: Any) -> AllVisible:
    if not isinstance(attention_mask, MaskSpec):
        raise MaskUsed()
    picking(_most(self.block_topk, self.compress_ratio))
    return AllVisible(attention_mask)


SELECTION = Substitution(
    find=lambda candidate: candidate.name == "forward" and hasattr(candidate.module, "block_topk"),
    small=_small,
    reference=lambda mask: mask == 0,
    replacement=lambda candidate: {"forward": _traced},
)
