"""Fits scales of block formats to values: weighted least squares, with a weight per column.

The searches are those of ggml's quantizers (make_qx_quants, make_qkx2_quants, iq4_nl; llama.cpp): try some scales near
the one that spans the range, give each value its nearest level, and take the best scale for these codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .base import Misfit, Parts
from .grouped import GroupFormat

if TYPE_CHECKING:
    from .blocks import BlockFormat

_ELEMENTS = 1 << 18  # values per chunk of rows, so that temporaries fit into a cache
_INT = {"u4": 15, "u6": 63, "i8": 127}
_F16_MAX = 65504.0


def can_fit(form: BlockFormat) -> bool:
    """Whether `fit_blocks` supports the format. It does not support formats with their own `fit`, with exponents,
    zeros, or scales other than float16, and those whose group scales are not integers."""
    scaled = form.scale == "f16" and not form.zeros and (form.group_scales == "none" or form.group_scales in _INT)
    return scaled and not isinstance(form, GroupFormat) and not (form.mins and form.group_scales == "i8")


@dataclass(frozen=True)
class BlockCoder:
    """The interface of GroupFormat that code searches use, for a block format: levels per group, and conversion to
    codes and back."""

    form: BlockFormat

    @property
    def group(self) -> int:
        """The number of values along K that share one entry of `levels`."""
        return self.form.group

    def levels(self, parts: Parts) -> tuple[Tensor, ...]:
        """The scale of each group and, with minima, the minimum: float32 [..., K / group]."""
        scale, offset = self.form.levels_of(parts)
        return (scale,) if offset is None else (scale, offset)

    def code(self, values: Tensor, *levels: Tensor) -> Tensor:
        """The nearest codes of `values`, as integers in float32 of the same shape. levels: of shapes that broadcast."""
        scale, *offset = levels
        shifted = values + offset[0] if offset else values
        return _nearest(self.form, shifted * _inverse(scale))

    def value(self, codes: Tensor, *levels: Tensor) -> Tensor:
        """The values of codes, float32 of the same shape. levels: of shapes that broadcast."""
        scale, *offset = levels
        found = _level(self.form, codes) * scale
        return found - offset[0] if offset else found

    def with_codes(self, codes: Tensor, fitted: Parts) -> Parts:
        """All parts of a weight: codes [..., N, K] and the parts of `fit_blocks`."""
        return {"codes": codes.to(torch.uint8), **fitted}

    def decode(self, parts: Parts) -> Tensor:
        """The float32 values [..., N, K] that `parts` stand for."""
        return self.form.decode(parts)


def fit_blocks(form: BlockFormat, values: Tensor, importance: Tensor | None = None) -> Parts:
    """All parts but the codes, for float values [..., N, K]. importance: [K] >= 0, the weights of columns; None: equal.
    Misfit if the format can only be read."""
    if not can_fit(form):
        raise Misfit(f"{form.name} is a format of files; nothing is encoded in it")
    k, lead = values.shape[-1], values.shape[:-1]
    weights = torch.ones(k) if importance is None else importance / importance.mean().clamp(min=1e-30) + 1e-6
    rows = values.reshape(-1, k)
    step = max(1, _ELEMENTS // k)
    chunks = [_fit_rows(form, rows[at : at + step].to(torch.float32), weights) for at in range(0, len(rows), step)]
    return {name: torch.cat([c[name] for c in chunks]).reshape(*lead, -1) for name in chunks[0]}


def encode_blocks(form: BlockFormat, values: Tensor, importance: Tensor | None = None) -> Parts:
    """The parts for float values [..., N, K], each rounded to its nearest level. importance: see `fit_blocks`."""
    coder, k = BlockCoder(form), values.shape[-1]
    fitted = fit_blocks(form, values, importance)
    rows = values.reshape(-1, k)
    levels = [level.reshape(len(rows), -1, 1) for level in coder.levels(fitted)]
    codes = torch.empty((len(rows), k), dtype=torch.uint8)
    step = max(1, _ELEMENTS // k)
    for at in range(0, len(rows), step):
        chunk = torch.unflatten(rows[at : at + step].to(torch.float32), -1, (-1, form.group))
        codes[at : at + step] = coder.code(chunk, *(level[at : at + step] for level in levels)).flatten(-2)
    return coder.with_codes(codes.reshape(values.shape), fitted)


def _fit_rows(form: BlockFormat, values: Tensor, weights: Tensor) -> Parts:
    x, w = torch.unflatten(values, -1, (-1, form.group)), weights.view(-1, form.group)
    if form.mins:
        scale, least = _affine(x, w, 2**form.bits - 1, _ratios(form.bits))
    else:
        scale, least = _scaled(form, x, w, _ratios(form.bits)), None
    per = form.size // form.group
    if form.group_scales == "none":
        found = {"scales": _half(scale / form.factor)}
        return found if least is None else {**found, "mins": _half(least)}
    top = _INT[form.group_scales]
    whole = _half(torch.unflatten(scale, -1, (-1, per)).abs().amax(-1) / (top * form.factor))
    found = {"scales": whole, "group_scales": _integers(scale, whole * form.factor, per, form)}
    if least is not None:
        whole = _half(torch.unflatten(least, -1, (-1, per)).amax(-1) / top)
        found |= {"mins": whole, "group_mins": _integers(least, whole, per, form)}
    return found


def _integers(values: Tensor, whole: Tensor, per: int, form: BlockFormat) -> Tensor:
    """Scales of groups [R, groups] as integer multiples of `whole`, the scales of blocks; `per`: groups per block."""
    top = _INT[form.group_scales]
    found = (values * _inverse(whole.repeat_interleave(per, -1))).round()
    signed = form.group_scales == "i8"
    return found.clamp(-top if signed else 0, top).to(torch.int8 if signed else torch.uint8)


def _ratios(bits: int) -> Sequence[float]:
    """The multiples to try of the scale that spans the range; with fewer bits it pays more to clip the extremes."""
    if bits <= 3:
        return (0.6, 0.68, 0.76, 0.82, 0.88, 0.94, 1.0, 1.07, 1.15)
    return (0.82, 0.87, 0.92, 0.96, 1.0, 1.04, 1.09) if bits == 4 else (0.94, 0.97, 1.0, 1.03)


def _scaled(form: BlockFormat, x: Tensor, w: Tensor, ratios: Sequence[float]) -> Tensor:
    """Scales [R, groups] of values x [R, groups, group] with weights w [groups, group]; their sign maps the largest
    value to the end of the levels with the larger magnitude."""
    at = x.abs().argmax(-1, keepdim=True)
    extreme = x.gather(-1, at)
    end = float(min(form.table) if form.table else -form.zero)
    best = torch.zeros(x.shape[:-1])
    gain = torch.zeros(x.shape[:-1])
    for ratio in ratios:
        scale = extreme * (ratio / end)
        level = _nearest_level(form, x * _inverse(scale))
        weighted = level * w
        both, own = (weighted * x).sum(-1), (weighted * level).sum(-1)
        explained = both.square() * _inverse(own)  # the energy explained with the best scale for these codes
        better = explained > gain
        best = torch.where(better, both * _inverse(own), best)
        gain = torch.where(better, explained, gain)
    return best


def _affine(x: Tensor, w: Tensor, top: int, ratios: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Scales and minima (>= 0) [R, groups] of values x [R, groups, group] with weights w [groups, group], for w = scale
    code - minimum."""
    low = x.amin(-1, keepdim=True).clamp(max=0.0)
    span = (x.amax(-1, keepdim=True) - low).clamp(min=0.0)
    wx = w * x
    total, sum_x = w.sum(-1), wx.sum(-1)
    best_scale, best_min = torch.zeros(x.shape[:-1]), -low.squeeze(-1)
    least = torch.full(x.shape[:-1], float("inf"))
    for ratio in ratios:
        code = ((x - low) * _inverse(span * (ratio / top))).round_().clamp_(0, top)
        wc = w * code
        sum_c, sum_cc, sum_xc = wc.sum(-1), (wc * code).sum(-1), (wx * code).sum(-1)
        scale = (total * sum_xc - sum_x * sum_c) * _inverse(total * sum_cc - sum_c.square())
        offset = (sum_x - scale * sum_c) / total
        alone = offset > 0  # an offset above zero cannot be stored
        scale = torch.where(alone, sum_xc * _inverse(sum_cc), scale).clamp(min=0.0)
        offset = torch.where(alone, torch.zeros_like(offset), offset)
        loss = (w * (x - code * scale.unsqueeze(-1) - offset.unsqueeze(-1)).square_()).sum(-1)
        better = loss < least
        best_scale, best_min = torch.where(better, scale, best_scale), torch.where(better, -offset, best_min)
        least = torch.where(better, loss, least)
    return best_scale, best_min


def _half(values: Tensor) -> Tensor:
    return values.clamp(-_F16_MAX, _F16_MAX).to(torch.float16).to(torch.float32)


def _inverse(values: Tensor) -> Tensor:
    return torch.where(values == 0, torch.zeros_like(values), 1 / values)


def _nearest(form: BlockFormat, places: Tensor) -> Tensor:
    """The nearest codes, as integers in float32, of values [..] in units of a scale."""
    if not form.table:
        return places.round().add_(form.zero).clamp_(0, 2**form.bits - 1)
    return _looked_up(_bins(form.table)[0], places)


def _level(form: BlockFormat, codes: Tensor) -> Tensor:
    if not form.table:
        return codes - form.zero
    table = torch.tensor(form.table, dtype=torch.float32)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def _nearest_level(form: BlockFormat, places: Tensor) -> Tensor:
    """The level of the nearest code of values [..] in units of a scale."""
    if not form.table:
        return places.round().clamp_(-form.zero, 2**form.bits - 1 - form.zero)
    return _looked_up(_bins(form.table)[1], places)


@cache
def _bins(levels: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """The nearest code and level, [512] each, for each bin of half a unit from -128 to 128: levels are integers, so the
    midpoint of two of them is a boundary of bins. 15 times as fast as a search."""
    table = torch.tensor(levels, dtype=torch.float32)
    codes = torch.bucketize(torch.arange(512) / 2 - 127.75, (table[1:] + table[:-1]) / 2)
    return codes.to(torch.float32), table[codes]


def _looked_up(table: Tensor, places: Tensor) -> Tensor:
    bins = (places * 2 + 256).clamp_(0, 511).to(torch.int32)
    return table.index_select(0, bins.reshape(-1)).view(places.shape)
