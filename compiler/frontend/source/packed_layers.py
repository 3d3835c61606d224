"""Linear layers of packed integers with a scale and a zero per group, in the forms of GPTQ, AWQ and compressed-tensors.

One class per form gives the sizes of a layer, the shapes that its tensors must have, and its codes, scales and zeros.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, prod
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import TensorError, UnsupportedModel
from ...weights.formats.base import Parts
from ...weights.formats.blocks import STEP, BlockFormat, ScaleType, grouped
from ...weights.handles import QuantizedWeight, Weight
from .packing import GPTQ_BITS
from .packings import GemvPacking, GptqPacking, Packing
from .words import columns, fields

_SCALES: dict[torch.dtype, ScaleType] = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
_AGAIN = "download the checkpoint again"
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the fields of a word that hold columns 0 to 7
_CODES = ("qweight", "weight_packed", "weight")


Expected = dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]]
_WORDS, _BYTES, _REALS = (torch.int32,), (torch.int8,), tuple(_SCALES)


@dataclass
class PackedLayer(QuantizedWeight):
    """The weight [N, K] of one linear layer. order: the order of its columns, [K], if groups are not consecutive
    inputs; else None."""

    layer: str
    tensors: Mapping[str, Weight]
    packing: Packing
    order: Tensor | None = field(init=False, default=None)
    format: BlockFormat = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False, default=torch.float32)
    given: ClassVar[bool] = True

    def __post_init__(self) -> None:
        (n, k), scales, groups = self.measured()
        self.shape = n, k
        group = k // groups if groups and k % groups == 0 else 0
        kind = _SCALES.get(scales.dtype)
        if kind is None or group % STEP or group == 0 or n == 0:
            raise TensorError(
                self.layer, f"has {groups} groups of {scales.dtype} scales for K = {k}", "icc has no such format"
            )
        for name, (types, expected) in self.expected(n, k, groups).items():
            found = self.tensors.get(name)
            one = found is not None and groups == 1 and prod(found.shape) == 1 and name not in _CODES
            if found is not None and (found.dtype not in types or not (one or found.shape == expected)):
                raise self._misfit(name, f"for a weight [{n}, {k}] with {groups} groups")
        self.format = grouped(max(self.bits, 4), group, kind)  # the engine stores fewer bits in 4
        index = self.tensors.get("g_idx") or self.tensors.get("weight_g_idx")
        if index is not None:
            self.order = self._order(index, group)

    @abstractmethod
    def measured(self) -> tuple[tuple[int, int], Weight, int]:
        """The sizes N and K, the scales, and the number of groups of a row. TensorError if a tensor is missing."""

    @abstractmethod
    def expected(self, n: int, k: int, groups: int) -> Expected:
        """The dtypes and the shape that each tensor of a weight [n, k] may have."""

    @abstractmethod
    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [N, K] as stored, scales and zeros [N, groups]."""

    @property
    def bits(self) -> int:
        """Bits of a code: from the tensors if layers of a model may differ, else from the configuration.
        UnsupportedModel if GPTQ's is not in GPTQ_BITS."""
        return self.packing.bits

    def tensor(self, name: str) -> Weight:
        """A packed tensor of the layer, by the last part of its name. TensorError if it is missing."""
        if name not in self.tensors:
            raise TensorError(f"{self.layer}.{name}", "is missing from the checkpoint", _AGAIN)
        return self.tensors[name]

    def sizes(self, name: str) -> tuple[int, int]:
        """The rows and columns of a packed tensor; TensorError if it is no matrix."""
        shape = self.tensor(name).shape
        if len(shape) != 2:
            raise self._misfit(name, "where a matrix is expected")
        return shape[0], shape[1]

    def _misfit(self, name: str, where: str) -> TensorError:
        found = self.tensors[name]
        kind = str(found.dtype).removeprefix("torch.")
        return TensorError(f"{self.layer}.{name}", f"is {kind} {list(found.shape)} {where}", _AGAIN)

    def _order(self, index: Weight, group: int) -> Tensor | None:
        """The columns [K] sorted by group; None if they are in this order. TensorError if groups have different
        sizes."""
        groups, k = index.load().to(torch.int64), self.shape[1]
        if groups.numel() and int(groups.min()) < 0 and bool((groups == -1).all()):
            return None  # compressed-tensors may write an index that was never filled in
        whole = groups.shape == (k,) and 0 <= int(groups.min()) and int(groups.max()) < k // group
        if not whole or not bool((torch.bincount(groups, minlength=k // group) == group).all()):
            raise TensorError(self.layer, f"has a g_idx that does not give each group {group} of {k} columns", _AGAIN)
        order = torch.argsort(groups, stable=True)
        return None if torch.equal(order, torch.arange(k)) else order

    def parts(self) -> Parts:
        """The codes, and scales and zeros of groups; see QuantizedWeight."""
        codes, scales, zeros = self.read()
        if not bool(torch.isfinite(scales).all()):
            raise TensorError(f"scales of {self.layer}", "hold NaN or Inf", "the checkpoint is damaged")
        if self.order is not None:
            codes = codes[:, self.order]
        return {"codes": codes, "scales": scales.to(torch.float32).contiguous(), "zeros": zeros.contiguous()}


class GptqLayer(PackedLayer):
    """GPTQ: codes are packed in words along K, zeros along N."""

    packing: GptqPacking  # type: ignore[assignment]

    @property
    def bits(self) -> int:
        words, n = self.sizes("qzeros")[1], self.sizes("scales")[1]
        bits = 32 * words // max(n, 1)
        if bits not in GPTQ_BITS:
            raise UnsupportedModel(f"layer {self.layer!r} is GPTQ of {bits} bits", "icc reads 2, 3, 4 and 8 bits")
        return bits

    def measured(self) -> tuple[tuple[int, int], Weight, int]:
        rows, n = self.sizes("qweight")
        return (n, rows * 32 // self.bits), self.tensor("scales"), self.sizes("scales")[0]

    def expected(self, n: int, k: int, groups: int) -> Expected:
        bits = self.bits
        return {
            "qweight": (_WORDS, (k * bits // 32, n)), "qzeros": (_WORDS, (groups, n * bits // 32)),
            "scales": (_REALS, (groups, n)),
        }  # fmt: skip

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        bits = self.bits
        codes = columns(self.tensor("qweight").load().T, bits)
        zeros = columns(self.tensor("qzeros").load(), bits).T
        if self.packing.one_less:
            zeros = (zeros + 1) & (2**bits - 1)
        return codes, self.tensor("scales").load().T, zeros


class AwqLayer(PackedLayer):
    """AWQ's gemm: codes are packed in words along N, in its kernel's order."""

    def measured(self) -> tuple[tuple[int, int], Weight, int]:
        k, words = self.sizes("qweight")
        self.tensor("qzeros")
        return (words * 8, k), self.tensor("scales"), self.sizes("scales")[0]

    def expected(self, n: int, k: int, groups: int) -> Expected:
        return {
            "qweight": (_WORDS, (k, n // 8)), "qzeros": (_WORDS, (groups, n // 8)), "scales": (_REALS, (groups, n)),
        }  # fmt: skip

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        def by_columns(name: str) -> Tensor:
            return fields(self.tensor(name).load(), 4)[..., _AWQ_ORDER].flatten(-2)

        return by_columns("qweight").T.contiguous(), self.tensor("scales").load().T, by_columns("qzeros").T


class GemvLayer(PackedLayer):
    """AWQ's gemv: codes are packed in words along K, in order; rows of scales and zeros are padded."""

    packing: GemvPacking  # type: ignore[assignment]

    def measured(self) -> tuple[tuple[int, int], Weight, int]:
        n, words = self.sizes("qweight")
        self.tensor("qzeros")
        return (n, words * 8), self.tensor("scales"), words * 8 // self.packing.group

    def expected(self, n: int, k: int, groups: int) -> Expected:
        # words of zeros per row: rounded up to a multiple of 2 in groups of 64, and of 4 in groups of 32
        multiple = max(128 * groups // k, 1)
        width = ceil(ceil(groups / 8) / multiple) * multiple
        return {"qweight": (_WORDS, (n, k // 8)), "qzeros": (_WORDS, (n, width)), "scales": (_REALS, (n, 8 * width))}

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        groups = self.shape[1] // self.packing.group
        zeros = columns(self.tensor("qzeros").load(), 4)[:, :groups]
        return columns(self.tensor("qweight").load(), 4), self.tensor("scales").load()[:, :groups], zeros


class WordsLayer(PackedLayer):
    """compressed-tensors' packed integers: codes and zeros are unsigned, with 2^(bits - 1) added."""

    @property
    def bits(self) -> int:
        words, k = self.sizes("weight_packed")[1], self.shape[1]
        return next((bits for bits in (4, 8) if words == ceil(k * bits / 32)), self.packing.bits)

    def measured(self) -> tuple[tuple[int, int], Weight, int]:
        stated = self.tensor("weight_shape")
        if stated.shape != (2,) or stated.dtype.is_floating_point:
            raise TensorError(f"{self.layer}.weight_shape", f"is {list(stated.shape)}, not two sizes", _AGAIN)
        n, k = (int(size) for size in stated.load())
        self.tensor("weight_packed")
        return (n, k), *_scales(self)

    def expected(self, n: int, k: int, groups: int) -> Expected:
        bits = self.bits
        return {
            "weight_packed": (_WORDS, (n, ceil(k * bits / 32))), "weight_scale": (_REALS, (n, groups)),
            "weight_zero_point": (_WORDS, (ceil(n * bits / 32), groups)),
        }  # fmt: skip

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        bits, (n, k) = self.bits, self.shape
        codes = columns(self.tensor("weight_packed").load(), bits)[:, :k].contiguous()
        scales = _every_row(self.tensor("weight_scale").load(), n)
        if "weight_zero_point" in self.tensors:
            zeros = fields(self.tensor("weight_zero_point").load().T, bits).flatten(-2).T[:n]
        else:
            zeros = torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.uint8)
        return codes, scales, zeros


class Int8Layer(PackedLayer):
    """compressed-tensors' int8: codes and zeros are signed bytes, whatever their number of bits."""

    @property
    def bits(self) -> int:
        return 8

    def measured(self) -> tuple[tuple[int, int], Weight, int]:
        return self.sizes("weight"), *_scales(self)

    def expected(self, n: int, k: int, groups: int) -> Expected:
        return {
            "weight": (_BYTES, (n, k)), "weight_scale": (_REALS, (n, groups)),
            "weight_zero_point": (_BYTES, (n, groups)),
        }  # fmt: skip

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        codes = self.tensor("weight").load().view(torch.uint8) ^ 128
        scales = _every_row(self.tensor("weight_scale").load(), len(codes))
        if "weight_zero_point" not in self.tensors:
            return codes, scales, torch.full(scales.shape, 128, dtype=torch.uint8)
        return codes, scales, _every_row(self.tensor("weight_zero_point").load().view(torch.uint8) ^ 128, len(codes))


def _scales(layer: PackedLayer) -> tuple[Weight, int]:
    """compressed-tensors' scales, and their number per row; a layer may have a single scale."""
    scales = layer.tensor("weight_scale")
    return scales, 1 if prod(scales.shape) == 1 else layer.sizes("weight_scale")[1]


def _every_row(values: Tensor, n: int) -> Tensor:
    """Scales or zeros [N, groups]; a single one is expanded to [N, 1]."""
    return values.reshape(1, 1).expand(n, 1) if values.numel() == 1 else values
