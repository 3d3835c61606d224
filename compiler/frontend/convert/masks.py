"""Finds the mask and the bias that a model's operations on attention scores before the softmax amount to.

The added and masked values are computed for some number of tokens, and their form is recognised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ...ops.attention import BIAS_MARGIN
from ...ops.attention_spec import ALL_AHEAD, AttentionMask
from .static_values import StaticValues
from .values import Dims

MASKED = -9000.0  # exp(-9000) is 0 in float32 next to any ordinary score
SMALL_TABLE = 48  # tokens for which a table is computed, to see its form
_LARGEST_TABLE = 4096  # tokens for which a mask is computed, to find out what it is
_MAX_ELEMENTS = 2**26


@dataclass(frozen=True)
class MaskStep:
    """One operation on attention scores.

    kind: "add", "sub", "mul" (by a table of 0 and 1), "keep" (where true), "mask" (where true) or "view". operand: a
    static node, a number, or the new dims of a view.
    """

    kind: str
    operand: Any  # a static node, a number, or the new dims of a view
    fill: Any = None  # the value of masked scores


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees, and what is added to their scores, in the form that icc::attention takes.

    window: number of tokens that a query sees, 0: all. chunk: tokens per chunk, if only tokens of a chunk see each
    other, 0: no chunks. ahead: number of later tokens that a query sees. slopes: ALiBi's, [heads]. bias: [heads, 2 * P]
    by distance.
    """

    window: int = 0
    chunk: int = 0
    ahead: int = 0
    slopes: Tensor | None = None
    bias: Tensor | None = None

    @property
    def seen(self) -> AttentionMask:
        """The part that is an attribute of the attention op; slopes and bias are operands."""
        return AttentionMask(self.window, self.chunk, self.ahead)


def analyse(static: StaticValues, max_tokens: int, steps: tuple[MaskStep, ...], heads: int) -> Mask:
    """The mask that `steps` amount to, in sequences of up to `max_tokens` tokens. ValueError if it cannot be written as
    a Mask."""
    small = _table(static, steps, SMALL_TABLE)
    per_head = max(1, math.prod(small.shape[:-2]))
    tokens = min(max_tokens, _LARGEST_TABLE, int((_MAX_ELEMENTS / per_head) ** 0.5))
    allowed = _table(static, steps, tokens) > MASKED
    flat = allowed.reshape(-1, tokens, tokens)
    if not bool((flat == flat[0]).all()):
        raise ValueError("an attention mask that differs between heads")
    window, chunk, ahead = _mask_of(flat[0])
    if tokens < max_tokens and max(window, chunk) == 0 and tokens < _LARGEST_TABLE // 4:
        raise ValueError("an attention bias that is too large to analyse")
    return _biased(static, max_tokens, steps, heads, Mask(window, chunk, ahead))


def with_bias(static: StaticValues, max_tokens: int, bias: fx.Node, heads: int, mask: Mask) -> Mask:
    """`mask`, with a static node added to the scores that it leaves. ValueError as for `analyse`."""
    return _biased(static, max_tokens, (MaskStep("add", bias),), heads, mask)


def _biased(static: StaticValues, max_tokens: int, steps: tuple[MaskStep, ...], heads: int, mask: Mask) -> Mask:
    sight = mask.window, mask.chunk, mask.ahead
    biases = _relative(_table(static, steps, SMALL_TABLE), *sight)
    if biases is None:
        return mask
    slopes = None if mask.ahead else _slopes(biases, mask.seen.visible(torch.arange(SMALL_TABLE)), heads)
    if slopes is not None:
        return replace(mask, slopes=slopes)
    return replace(mask, bias=_by_distance(_table(static, steps, max_tokens), *sight, heads))


def _table(static: StaticValues, steps: tuple[MaskStep, ...], tokens: int) -> Tensor:
    """The scores after `steps` if q k^T is 0: [.., T, T]; head axes have size 1 if all heads are equal."""
    table = torch.zeros(tokens, tokens)

    def value(operand: Any) -> Any:
        return static.evaluate(operand, tokens) if isinstance(operand, fx.Node) else operand

    for step in steps:
        if step.kind == "add":
            table = table + value(step.operand)
        elif step.kind == "sub":
            table = table - value(step.operand)
        elif step.kind == "mul":
            table = table * value(step.operand)
        elif step.kind == "view":
            before, after = step.operand
            table = _view(table, before, after, tokens)
        else:
            fill = torch.as_tensor(value(step.fill), dtype=torch.float32)
            where = value(step.operand).to(torch.bool)
            table = torch.where(where, table, fill) if step.kind == "keep" else torch.where(where, fill, table)
    return table


def _view(table: Tensor, before: Dims, after: Dims, tokens: int) -> Tensor:
    if math.prod(table.shape[:-2]) == 1:
        return table.reshape(*(1,) * (len(after) - 2), tokens, tokens)
    full = table.expand(*before[:-2], tokens, tokens)
    return full.reshape(*after[:-2], tokens, tokens)


def _mask_of(allowed: Tensor) -> tuple[int, int, int]:
    """(window, chunk, ahead) of a boolean table over (query, key)."""
    tokens = allowed.shape[0]
    positions = torch.arange(tokens)
    seen_by_last, seen_by_first = int(allowed[-1].sum()), int(allowed[0].sum())
    lost = (~allowed[:, 0]).nonzero()
    candidates = [(0, 0, 0), (seen_by_last, 0, 0), (0, int(lost[0]) if lost.numel() else 0, 0)]
    candidates += [(0, 0, ALL_AHEAD), (seen_by_last, 0, seen_by_first - 1)]
    for window, chunk, ahead in candidates:
        if torch.equal(allowed, AttentionMask(window, chunk, ahead).visible(positions)):
            return window, chunk, ahead
    raise ValueError("an attention mask that is neither causal, bidirectional, sliding-window nor chunked")


def _relative(table: Tensor, window: int, chunk: int, ahead: int) -> Tensor | None:
    """The values that a table adds to visible scores, [heads, T, T]; None if it only masks.

    A softmax is unchanged by a constant added to a whole row, so only differences within a row count.
    """
    tokens = table.shape[-1]
    allowed = AttentionMask(window, chunk, ahead).visible(torch.arange(tokens))
    flat = table.reshape(-1, tokens, tokens).double()
    relative = flat - flat.diagonal(dim1=1, dim2=2)[:, :, None]
    relative = relative.masked_fill(~allowed, 0.0)
    return None if float(relative.abs().max()) == 0.0 else relative


def _slopes(relative: Tensor, allowed: Tensor, heads: int) -> Tensor | None:
    """ALiBi slopes [heads] of the result of `_relative`; None if it is not linear in the distance."""
    tokens = relative.shape[-1]
    slopes = -relative[:, 1, 0]
    distance = torch.arange(tokens)[None, :] - torch.arange(tokens)[:, None]
    ideal = (slopes[:, None, None] * distance).masked_fill(~allowed, 0.0)
    if float((relative - ideal).abs().max()) > 1e-5 * max(1.0, float(ideal.abs().max())):
        return None
    return slopes.expand(heads).to(torch.float32).contiguous()


def _by_distance(table: Tensor, window: int, chunk: int, ahead: int, heads: int) -> Tensor:
    """[heads, 2 * P]: the value that a table [.., T, T] of the longest sequence adds at each distance; see
    icc::attention. ValueError if the value differs between pairs of the same distance."""
    tokens = table.shape[-1]
    relative = _relative(table, window, chunk, ahead)
    assert relative is not None
    middle = (tokens + BIAS_MARGIN + 15) // 16 * 16
    found = torch.zeros(relative.shape[0], 2 * middle)
    found[:, middle : middle + tokens] = relative[:, 0].float()
    found[:, middle - tokens + 1 : middle + 1] = relative[:, -1].float()
    columns = middle + torch.arange(tokens)[None, :] - torch.arange(tokens)[:, None]
    allowed = AttentionMask(window, chunk, ahead).visible(torch.arange(tokens))
    for head, expected in zip(found, relative, strict=True):
        if float((head[columns] - expected).masked_fill(~allowed, 0.0).abs().max()) > 1e-5 * max(
            1.0, float(head.abs().max())
        ):
            raise ValueError("a bias of the attention scores that is more than one of the distance")
    return found.expand(heads, -1).contiguous()
