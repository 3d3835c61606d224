"""Modules that pick the tokens that attention reads query by query: all of them, where no sequence is longer than that.

Qwen4's index picks the best of blocks of tokens that one key stands for, and the tokens behind the last whole block. A
module is a candidate by the names of its parts; a small copy of it must pick every token that the mask lets through of
as many tokens as that, and not of one block more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..mask_spec import AllVisible, MaskSpec, MaskUsed, picking
from .experts import divided

_BLOCKS, _PER_BLOCK, _WIDTH = 2, 4, 8  # of the small copy


@contextlib.contextmanager
def replaced_selections(model: nn.Module) -> Iterator[None]:
    """All tokens in the place of what the modules of `model` pick; UnsupportedModel where that is another choice."""
    modules = {type(module): module for module in model.modules() if hasattr(module, "block_topk")}
    with contextlib.ExitStack() as stack:
        for cls, module in modules.items():
            if _picks_all(module):
                stack.enter_context(mock.patch.object(cls, "forward", _traced))
        yield


def _traced(self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, *rest: Any) -> AllVisible:
    if not isinstance(attention_mask, MaskSpec):
        raise MaskUsed()
    picking(_most(self.block_topk, self.compress_ratio))
    return AllVisible(attention_mask)


def _most(blocks: int, per_block: int) -> int:
    """The longest sequence of which all tokens are picked."""
    return (blocks + 1) * per_block - 1


def _picks_all(module: Any) -> bool:
    """Whether a small copy of a module picks what `_most` says."""
    with _disable_current_modes(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        try:
            small: Any = divided(module, {module.index_qk_proj.in_features: _WIDTH}, generator)
            small.block_topk, small.compress_ratio, small.token_budget = _BLOCKS, _PER_BLOCK, _BLOCKS * _PER_BLOCK
            most = _most(_BLOCKS, _PER_BLOCK)
            return [_all_picked(small, tokens, generator) for tokens in (most, most + 1)] == [True, False]
        except Exception:  # whatever it needs, it is none of these
            return False


def _all_picked(module: Any, tokens: int, generator: torch.Generator) -> bool:
    x = torch.randn(1, tokens, _WIDTH, generator=generator)
    angles = torch.rand(1, tokens, module.index_head_dim, generator=generator)
    mask = torch.full((1, 1, tokens, tokens), torch.finfo(torch.float32).min).triu(1)
    return torch.equal(module(x, (angles.cos(), angles.sin()), mask, None), mask == 0)
