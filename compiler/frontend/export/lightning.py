"""Linear attention that a modeling file writes out in blocks of tokens, so that a trace would depend on their number.

Lightning attention (Qin et al. 2024): a state of each head that decays at a rate of its own. A module is a candidate by
the names of its parts; a small copy of it, on random numbers, must compute what ours does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import UnsupportedModel
from .cells import COMPUTED, TRACED, Recurrences
from .experts import divided

_TOKENS, _BLOCK, _WIDTH = 7, 3, 2  # of the small copy
_TAKES = ("hidden_states", "position_embeddings", "attention_mask", "past_key_values")


def lightning_attention(module: Any, ops: Recurrences, hidden_states: Tensor) -> Tensor:
    """gate(x) * norm(scan(act(qkv(x)))): hidden_states[1, T, H] -> [1, T, H]. Per head, S <- exp(-rate) S + k v^T and
    the result is S^T q."""
    heads, width = module.num_attention_heads, module.head_dim
    shape = hidden_states.shape[:2]
    qkv = module.act_fn(module.qkv_proj(hidden_states)).reshape(*shape, heads, 3 * width)
    q, k, v = torch.split(qkv, width, dim=3)
    decay = (-module.slope_rate).reshape(1, 1, heads).expand(*shape, heads)
    out = module.norm(ops.gated(q, k, v, decay, None, False).reshape(*shape, heads * width))
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * out)


@contextlib.contextmanager
def lightning_layers(model: nn.Module) -> Iterator[None]:
    """Ours in the place of the modules of `model` that compute the same."""
    modules = {type(module): module for module in model.modules() if hasattr(module, "slope_rate")}
    with contextlib.ExitStack() as stack:
        for cls, module in modules.items():
            if _same(module):
                stack.enter_context(mock.patch.object(cls, "forward", _traced))
        yield


def _traced(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    given = dict(zip(_TAKES[1:], args, strict=False)) | kwargs
    for name in ("attention_mask", "past_key_values"):
        if given.get(name) is not None:
            raise UnsupportedModel(f"linear attention with {name} is not supported", op="gated_scan")
    return lightning_attention(self, TRACED, hidden_states), None


def _same(module: Any) -> bool:
    """Whether a small copy of a module computes what ours does."""
    with _disable_current_modes(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        try:
            small = _small(module, generator)
            x = torch.randn(1, _TOKENS, small.out_proj.weight.shape[0], generator=generator)
            expected = small(x, None, None)[0]
            return torch.allclose(lightning_attention(small, COMPUTED, x), expected, atol=1e-5)
        except Exception:  # whatever it needs, it is no lightning attention
            return False


def _small(module: Any, generator: torch.Generator) -> Any:
    heads, width, hidden = module.num_attention_heads, module.head_dim, module.out_proj.weight.shape[0]
    inner = heads * _WIDTH
    sizes = {hidden: inner, heads * width: inner, 3 * heads * width: 3 * inner}
    small: Any = divided(module, sizes, generator)
    small.head_dim, small.block_size, small.num_attention_heads = _WIDTH, _BLOCK, heads
    small.slope_rate = torch.rand(heads, 1, 1, generator=generator)
    factors: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] = small.decay_factors
    small.query_decay, small.key_decay, small.diagonal_decay = factors(small.slope_rate)
    return small
