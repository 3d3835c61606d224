"""Checkpoints of bitsandbytes: NF4 and FP4 in blocks of a flattened matrix, and LLM.int8's rows of integers.

(Dettmers et al. 2023, arXiv:2305.14314; 2022, arXiv:2208.07339.) Scales of 4-bit blocks may be quantized themselves:
8-bit codes into a table, one scale per 256 codes, and an offset. The engine stores them as float32 values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd, isfinite, prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import TensorError, UnsupportedModel
from ...weights.formats.base import Parts
from ...weights.formats.blocks import STEP, BlockFormat, grouped
from ...weights.formats.grouped import GROUPS
from ...weights.formats.tables import GroupedTable, fp4, nf4
from ...weights.handles import QuantizedWeight, Weight
from .checkpoint import as_bytes

_AGAIN, _DAMAGED = "download the checkpoint again", "the checkpoint is damaged"
_STATE = "quant_state.bitsandbytes__"
_MADE = {"nf4": nf4, "fp4": fp4}
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *(_STATE + kind for kind in _MADE))
_MOST_FACTS = 1 << 16  # bytes of a quant_state tensor


def with_states(tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """The checkpoint with one handle in place of each matrix and its further tensors, by the name of the weight.

    TensorError if a tensor is missing or damaged, UnsupportedModel for a table or a layout that icc does not read.
    """
    taken: set[str] = set()
    found: dict[str, Weight] = {}
    for name in tensors:
        weight, _, part = name.rpartition(".")
        if part == "absmax":
            own = {part: tensors[f"{weight}.{part}"] for part in _PARTS if f"{weight}.{part}" in tensors}
            found[weight] = BlockwiseMatrix(weight, _tensor(tensors, weight), own)
            taken |= {weight, *(f"{weight}.{part}" for part in own)}
        elif part == "SCB":
            whole = f"{weight}.weight"
            found[whole] = Int8Matrix(whole, _tensor(tensors, whole), tensors[name], tensors.get(f"{whole}_format"))
            taken |= {whole, name, f"{whole}_format"}
    return {**{name: weight for name, weight in tensors.items() if name not in taken}, **found}


def _tensor(tensors: Mapping[str, Weight], name: str) -> Weight:
    if name not in tensors:
        raise TensorError(name, "is missing from the checkpoint", _AGAIN)
    return tensors[name]


@dataclass(frozen=True)
class _State:
    """The content of the JSON in a quant_state tensor. nested: number of scales that share a scale; 0 if scales are not
    quantized."""

    kind: str
    blocksize: int
    shape: tuple[int, int]
    nested: int
    offset: float


def _state(name: str, tensors: Mapping[str, Weight]) -> _State:
    key = next((_STATE + kind for kind in _MADE if _STATE + kind in tensors), None)
    if key is None:
        raise TensorError(f"{name}.{_STATE}nf4", "is missing from the checkpoint", _AGAIN)
    raw = tensors[key]
    try:
        if raw.dtype != torch.uint8 or not 0 < prod(raw.shape) <= _MOST_FACTS:
            raise ValueError("it is no text")
        facts: Any = json.loads(bytes(raw.load().reshape(-1).tolist()))
        n, k = (int(size) for size in facts["shape"])
        found = _State(
            str(facts["quant_type"]), int(facts["blocksize"]), (n, k),
            int(facts["nested_blocksize"]) if "nested_absmax" in tensors else 0, float(facts.get("nested_offset", 0.0)),
        )  # fmt: skip
        sizes = found.blocksize > 0 and n > 0 and k > 0 and (found.nested > 0 or "nested_absmax" not in tensors)
        if found.kind not in _MADE or not sizes or not isfinite(found.offset):
            raise ValueError("it says what cannot be")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TensorError(f"{name}.{key}", f"does not say how the matrix is stored: {error}", _DAMAGED) from error
    return found


@dataclass
class BlockwiseMatrix(QuantizedWeight):
    """A matrix [N, K] whose elements, flattened row by row, form blocks with one scale each.

    If rows are not divisible into blocks, a block's scale is stored for each of several smaller groups.
    """

    name: str
    codes: Weight
    tensors: Mapping[str, Weight]
    state: _State = field(init=False)
    format: GroupedTable = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False, default=torch.float32)
    given: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.state = _state(self.name, self.tensors)
        self.shape = n, k = self.state.shape
        self.codes = as_bytes(self.codes)  # with bnb_4bit_quant_storage their dtype may be a float type
        if prod(self.codes.shape) * 2 != n * k:
            raise TensorError(self.name, f"has {prod(self.codes.shape)} bytes for a 4-bit matrix [{n}, {k}]", _AGAIN)
        blocks = -(-n * k // self.state.blocksize)
        if prod(self.tensors["absmax"].shape) != blocks:
            raise TensorError(f"{self.name}.absmax", f"has not the {blocks} scales of a matrix [{n}, {k}]", _AGAIN)
        group = next((size for size in GROUPS if gcd(k, self.state.blocksize) % size == 0), 0)
        if not group:
            raise UnsupportedModel(
                f"{self.name!r} has rows of {k} values in blocks of {self.state.blocksize}",
                f"icc reads those with groups of {STEP} values or more",
            )
        self.format = _MADE[self.state.kind](group, "f32")
        stored = self.tensors.get("quant_map")
        if stored is not None and (stored.shape != (16,) or not _alike(stored.load(), self.format.values)):
            raise UnsupportedModel(f"{self.name!r} has a table of its own, not that of {self.state.kind}")

    def parts(self) -> Parts:
        """The codes, and a float32 scale for each group of a row. TensorError for sizes that do not fit."""
        pairs = self.codes.load().reshape(-1)
        codes = torch.stack((pairs >> 4, pairs & 15), -1).reshape(self.shape)
        scales, group = self._scales(), self.format.group
        if not bool(torch.isfinite(scales).all()):
            raise TensorError(f"{self.name}.absmax", "gives scales that are NaN or Inf", _DAMAGED)
        n, k = self.shape
        starts = torch.arange(0, n * k, group) // self.state.blocksize
        return {"codes": codes, "scales": scales[starts].reshape(n, k // group)}

    def _scales(self) -> Tensor:
        """The scale of every block [blocks], float32."""
        stored = self.tensors["absmax"].load().reshape(-1)
        if not self.state.nested:
            return stored.to(torch.float32)
        table, scales = (self.tensors.get(f"nested_{part}") for part in ("quant_map", "absmax"))
        if (
            table is None
            or scales is None
            or stored.dtype != torch.uint8
            or not (prod(table.shape) == 256 and prod(scales.shape) * self.state.nested >= len(stored))
        ):
            raise TensorError(f"{self.name}.nested_absmax", f"does not fit {len(stored)} scales", _AGAIN)
        spread = scales.load().reshape(-1).to(torch.float32).repeat_interleave(self.state.nested)[: len(stored)]
        values = table.load().reshape(-1).to(torch.float32)[stored.to(torch.int64)]
        return values * spread + torch.tensor(self.state.offset, dtype=torch.float32)


def _alike(stored: Tensor, table: Tensor) -> bool:
    return torch.allclose(stored.to(torch.float32), table, rtol=0, atol=1e-6)


@dataclass
class Int8Matrix(QuantizedWeight):
    """A matrix [N, K] of int8: `scales` [N] holds the value for which 127 stands in each row.

    LLM.int8 multiplies columns with outliers in the activations in 16 bits; icc multiplies none so."""

    name: str
    codes: Weight
    scales: Weight
    layout: Weight | None
    format: BlockFormat = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False, default=torch.float32)
    given: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.shape = self.codes.shape
        if len(self.shape) != 2 or self.codes.dtype != torch.int8 or prod(self.scales.shape) != self.shape[0]:
            kind = str(self.codes.dtype).removeprefix("torch.")
            raise TensorError(self.name, f"is {kind} {list(self.shape)} with {prod(self.scales.shape)} scales", _AGAIN)
        if self.layout is not None and bool(self.layout.load().any()):
            raise UnsupportedModel(f"{self.name!r} is stored in the order of a GPU's tiles", "icc reads rows")
        if self.shape[1] % STEP:
            raise UnsupportedModel(
                f"{self.name!r} has rows of {self.shape[1]} values", f"icc reads multiples of {STEP}"
            )
        self.format = grouped(8, self.shape[1], "f32")

    def parts(self) -> Parts:
        """The codes [N, K] and a scale per row; see QuantizedWeight."""
        scales = self.scales.load().to(torch.float32).reshape(-1, 1) / 127
        codes = self.codes.load().view(torch.uint8) ^ 128
        return {"codes": codes, "scales": scales, "zeros": torch.full(scales.shape, 128, dtype=torch.uint8)}
