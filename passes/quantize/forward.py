"""The functions with which calibration computes the ops of a graph: the references without slow dispatch, copies and
masks.

Results differ from the reference interpreter's only by the order of float32 sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from ...compiler.graph.interpret import eager
from ...compiler.ops import OPS, AttentionSpec, op_of


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
    spec: AttentionSpec,
    *added: Tensor | None,
) -> Tensor:
    """icc::attention by torch's fused kernels, which skip keys that a causal mask hides."""
    if any(given is not None for given in added) or spec.softcap or q.device.type == "meta":
        return _ATTENTION.reference(q, k, v, spec, *added)
    seen = spec.mask
    tokens, groups = len(q), q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
    limited = 0 < seen.window < tokens or 0 < seen.chunk < tokens or seen.ahead > 0
    mask = seen.visible(torch.arange(tokens, device=q.device)) if limited else None
    heads = [x.transpose(0, 1).unsqueeze(0) for x in (q, keys, values)]
    causal = not limited and not seen.ahead
    found = F.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=causal, scale=spec.scale)
    return found.squeeze(0).transpose(0, 1).contiguous()


_ATTENTION = OPS["attention"]
_FASTER: dict[Any, Callable[..., Any]] = {OPS["linear"].overload: F.linear, _ATTENTION.overload: _attention}
