"""The ops of a graph as calibration computes them: the references, without dispatch, copies and masks that cost time.

Results differ from the reference interpreter's by the order of float32 sums only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from ...compiler.graph.interpret import eager
from ...compiler.ops import OPS, op_of
from ...compiler.ops.attention import visible


def fast(target: Any) -> Callable[..., Any]:
    """The function that computes a node's target in calibration."""
    if target in _FASTER:
        return _FASTER[target]
    declared = op_of(target)
    if declared is not None and getattr(target, "namespace", "aten") != "aten":
        return declared.reference
    return eager(target)


def _attention(
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
    """icc::attention by torch's fused kernels, which skip what a causal mask hides."""
    added = sinks, alibi, bias, row_bias, key_bias
    if any(given is not None for given in added) or softcap or q.device.type == "meta":
        options = layer, scale, window, chunk, softcap, ahead, bias, row_bias, later, key_bias, key_later
        return _ATTENTION.reference(q, k, v, sinks, alibi, *options)
    tokens, groups = len(q), q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
    limited = 0 < window < tokens or 0 < chunk < tokens or ahead > 0
    mask = visible(torch.arange(tokens, device=q.device), window, chunk, ahead) if limited else None
    heads = [x.transpose(0, 1).unsqueeze(0) for x in (q, keys, values)]
    found = F.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=not limited and not ahead, scale=scale)
    return found.squeeze(0).transpose(0, 1).contiguous()


_ATTENTION = OPS["attention"]
_FASTER: dict[Any, Callable[..., Any]] = {OPS["linear"].overload: F.linear, _ATTENTION.overload: _attention}
