"""The choice of the tokens that attention reads, by an index of its own (DeepSeek-V3.2's sparse attention, 2025)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .base import Cost, op, tensor_bytes
from .traits import Traits

LEFT_OUT = -30000.0  # instead of minus infinity: every float type can hold it, and its weight in a softmax is 0


@op(Traits(mixes_tokens=True, stateful=True, selects=True))
def choose_keys(q: Tensor, k: Tensor, w: Tensor, layer: int, count: int, width: int) -> Tensor:
    """[T, 1, width]: the bias of each token's attention scores by the distance of a key, 0 or LEFT_OUT.

    q [T, H, D], k [T, 1, D] and w [T, H] score the keys of one sequence for its token t, sum over h of w[t, h]
    relu(q[t, h] k[j]), and the `count` best keys up to the token itself are chosen; of equal ones the earlier. Column t
    - j belongs to key j, as in `row_bias` of icc::attention. `layer` numbers the cache of k.
    """
    tokens = q.shape[0]
    rows = q.new_zeros(tokens, 1, width)
    if q.device.type == "meta" or tokens <= count:
        return rows
    scores = torch.einsum(
        "th,thj->tj", w.double(), torch.relu(torch.einsum("thd,jd->thj", q.double(), k[:, 0].double()))
    )
    for t in range(count, tokens):
        order = torch.sort(scores[t, : t + 1], descending=True, stable=True).indices
        rows[t, 0, t - order[count:]] = LEFT_OUT
    return rows


@choose_keys.set_cost
def _cost(q: Tensor, k: Tensor, w: Tensor, layer: int, count: int, width: int) -> Cost:
    return Cost(2.0 * q.numel() * k.shape[0], tensor_bytes(q, k, w) + 4.0 * q.shape[0] * width)


@choose_keys.set_samples
def _samples() -> Iterator[tuple[object, ...]]:
    for tokens, heads, dim, count in ((1, 1, 8, 1), (19, 3, 40, 4), (21, 2, 16, 20), (21, 4, 24, 21)):
        yield torch.randn(tokens, heads, dim), torch.randn(tokens, 1, dim), torch.randn(tokens, heads), 0, count, 32
