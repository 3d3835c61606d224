"""The base weight that an adapter was trained on, if its method changes the base first: PiSSA, OLoRA, LoftQ."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.adapters.adapter import LowRank, Start
from .weights.formats.tables import NF4

_BLOCK = 64  # values that share a scale, as in bitsandbytes


def trained_over(weight: Tensor, start: Start, low: LowRank, transposed: bool = False) -> Tensor:
    """The weight, in the shape of `weight`, that PEFT put in place of the base's before it trained A and B.

    weight: the base's, float32 [out, in], or [in, out] if transposed. low: rank and scale of the adapter.
    """
    if start.kind == "loftq":
        return _rounded_base(weight, start, low.rank)
    lines = weight.mT if transposed else weight
    taken = _began_as(lines, start.kind, low)
    return weight - (taken.mT if transposed else taken)


def _began_as(weight: Tensor, kind: str, low: LowRank) -> Tensor:
    """scale * B A, [out, in], with the values of A and B before training."""
    if kind == "olora":
        q, r = torch.linalg.qr(weight)
        return low.scale * (q[:, : low.rank] @ r[: low.rank])
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    return (u[:, : low.rank] * s[: low.rank]) @ v[: low.rank]


def _rounded_base(weight: Tensor, start: Start, rank: int) -> Tensor:
    """LoftQ's rounded base (Li et al. 2023, arXiv:2310.08659; peft/utils/loftq_utils.py): round the weight, find the
    best B A for the error, round the weight minus B A, and repeat."""
    rounded = _nf4 if start.bits == 4 else _int8
    found = rounded(weight)
    for _ in range(start.iterations - 1):
        u, s, v = torch.linalg.svd(weight - found, full_matrices=False)
        found = rounded(weight - (u[:, :rank] * s[:rank]) @ v[:rank])
    return found


def _nf4(weight: Tensor) -> Tensor:
    """NF4 with a float32 scale per 64 values, row after row (Dettmers et al. 2023, arXiv:2305.14314)."""
    table = torch.tensor(NF4)
    flat = weight.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % _BLOCK)).view(-1, _BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    codes = torch.bucketize(blocks * (1 / scales.clamp(min=2.0**-120)), (table[1:] + table[:-1]) / 2)
    return (table[codes] * scales).view(-1)[: flat.numel()].view(weight.shape)


def _int8(weight: Tensor) -> Tensor:
    """The weight rounded per row as LLM.int8 does (Dettmers et al. 2022, arXiv:2208.07339), after a conversion to
    float16."""
    values = weight.half().float()
    peak = values.abs().amax(1, keepdim=True)
    return (values * (127 / peak.clamp(min=2.0**-120))).round() * peak / 127
