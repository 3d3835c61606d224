"""Checkpoints whose linear layers are packed integers with a scale and a zero per group.

GPTQ, AWQ (gemm and gemv) and compressed-tensors (pack-quantized, int-quantized). Each layer's tensors become one handle
by the name of its weight, whose values are (code - zero) scale as they are. What others make (8-bit and 4-bit floats,
bitsandbytes, MLX, HQQ, BitNet) has files of its own. Layers of one compressed-tensors checkpoint may be of any of its
kinds: what a layer's tensors are called and of which type they are says which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, prod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...errors import TensorError, UnsupportedModel
from ...weights.formats.base import Parts
from ...weights.formats.blocks import STEP, BlockFormat, ScaleType, grouped
from ...weights.handles import QuantizedWeight, SortedColumns, Weight
from .bitnet import with_signs
from .bitsandbytes import with_states
from .e2m1 import with_floats
from .float8 import with_scales
from .hqq import with_zeros
from .mlx import with_biases
from .packing import GPTQ_BITS, Packing
from .words import columns, fields

_SCALES: dict[torch.dtype, ScaleType] = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
_AGAIN = "download the checkpoint again"
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the fields of a word are that hold columns 0 to 7
Tensors = dict[str, Weight]


def unpacked(tensors: Mapping[str, Weight], packing: Packing) -> dict[str, Weight]:
    """The checkpoint with a handle in place of each layer's packed tensors; TensorError where some are missing."""
    if packing.kind == "float8":
        return with_scales(tensors, packing.block, packing.alone)
    if packing.kind == "e2m1":
        return with_scales(with_floats(tensors), packing.block, packing.alone)  # of some models layers are of 8 bits
    if packing.kind == "bitsandbytes":
        return with_states(tensors)
    if packing.kind == "hqq":
        return with_zeros(tensors)
    if packing.kind == "bitnet":
        return with_signs(tensors, packing.divides)
    if packing.kind == "mlx":
        return with_biases(tensors, packing)
    rest = _with_integers(tensors, packing)
    return with_scales(with_floats(rest), packing.block, packing.alone) if packing.kind == "compressed" else rest


def _with_integers(tensors: Mapping[str, Weight], packing: Packing) -> dict[str, Weight]:
    taken: set[str] = set()
    found: dict[str, Weight] = {}
    for name in tensors:
        layer, kind = name.rpartition(".")[0], _kind(name, tensors, packing)
        if kind is None:
            continue
        own = {n: tensors[f"{layer}.{n}"] for n in _NAMES if f"{layer}.{n}" in tensors}
        taken |= {f"{layer}.{n}" for n in own}
        weight = PackedLayer(layer, own, replace(packing, kind=kind, bits=8 if kind == "int8" else packing.bits))
        found[f"{layer}.weight"] = weight if weight.order is None else SortedColumns(weight, weight.order)
    return {**{name: weight for name, weight in tensors.items() if name not in taken}, **found}


def _kind(
    name: str, tensors: Mapping[str, Weight], packing: Packing
) -> Literal["gptq", "awq", "gemv", "compressed", "int8"] | None:
    """How the layer is packed whose codes a tensor holds; None if the tensor holds no codes, or floats."""
    layer, _, last = name.rpartition(".")
    if packing.kind != "compressed":
        return packing.kind if last == "qweight" else None  # type: ignore[return-value]
    if last == "weight_packed":
        return "compressed" if tensors[name].dtype != torch.uint8 else None
    integers = last == "weight" and tensors[name].dtype == torch.int8 and f"{layer}.weight_scale" in tensors
    return "int8" if integers else None


_CODES = ("qweight", "weight_packed", "weight")
_NAMES = (
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape",
    "weight_g_idx", "weight", "input_scale", "output_scale", "input_zero_point",
)  # fmt: skip


@dataclass
class PackedLayer(QuantizedWeight):
    """The weight [N, K] of one linear layer, its columns in `order` where groups do not lie in that of the inputs."""

    layer: str
    tensors: Tensors
    packing: Packing
    order: Tensor | None = field(init=False, default=None)
    format: BlockFormat = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False, default=torch.float32)
    given: ClassVar[bool] = True

    def __post_init__(self) -> None:
        (n, k), scales, groups = _SHAPES[self.packing.kind](self)
        self.shape = n, k
        group = k // groups if groups and k % groups == 0 else 0
        kind = _SCALES.get(scales.dtype)
        if kind is None or group % STEP or group == 0 or n == 0:
            raise TensorError(
                self.layer, f"has {groups} groups of {scales.dtype} scales for K = {k}", "icc has none such"
            )
        for name, (types, expected) in _EXPECTED[self.packing.kind](n, k, groups, self.bits).items():
            found = self.tensors.get(name)
            one = found is not None and groups == 1 and prod(found.shape) == 1 and name not in _CODES
            if found is not None and (found.dtype not in types or not (one or found.shape == expected)):
                raise self._misfit(name, f"for a weight [{n}, {k}] with {groups} groups")
        self.format = grouped(max(self.bits, 4), group, kind)  # fewer bits are stored in four
        index = self.tensors.get("g_idx") or self.tensors.get("weight_g_idx")
        if index is not None:
            self.order = self._order(index, group)

    def tensor(self, name: str) -> Weight:
        """A packed tensor of the layer, by the end of its name. TensorError if it is missing."""
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

    @property
    def bits(self) -> int:
        """Bits of a code. Layers of a model may differ, so that the tensors decide where they show it, and the
        configuration elsewhere. UnsupportedModel for another number of bits than GPTQ_BITS."""
        if self.packing.kind == "compressed":
            words, k = self.sizes("weight_packed")[1], self.shape[1]
            return next((bits for bits in (4, 8) if words == ceil(k * bits / 32)), self.packing.bits)
        if self.packing.kind != "gptq":
            return self.packing.bits
        words, n = self.sizes("qzeros")[1], self.sizes("scales")[1]
        bits = 32 * words // max(n, 1)
        if bits not in GPTQ_BITS:
            raise UnsupportedModel(f"layer {self.layer!r} is GPTQ of {bits} bits", "icc reads 2, 3, 4 and 8 bits")
        return bits

    def _order(self, index: Weight, group: int) -> Tensor | None:
        """The columns group by group; None if they lie so. TensorError where groups are not all of one size."""
        groups, k = index.load().to(torch.int64), self.shape[1]
        if groups.numel() and int(groups.min()) < 0 and bool((groups == -1).all()):
            return None  # compressed-tensors: an index that was never filled in
        whole = groups.shape == (k,) and 0 <= int(groups.min()) and int(groups.max()) < k // group
        if not whole or not bool((torch.bincount(groups, minlength=k // group) == group).all()):
            raise TensorError(self.layer, f"has a g_idx that does not give each group {group} of {k} columns", _AGAIN)
        order = torch.argsort(groups, stable=True)
        return None if torch.equal(order, torch.arange(k)) else order

    def parts(self) -> Parts:
        """The codes, scales and zeros of groups; see QuantizedWeight."""
        codes, scales, zeros = _READERS[self.packing.kind](self)
        if not bool(torch.isfinite(scales).all()):
            raise TensorError(f"scales of {self.layer}", "hold NaN or Inf", "the checkpoint is damaged")
        if self.order is not None:
            codes = codes[:, self.order]
        return {"codes": codes, "scales": scales.to(torch.float32).contiguous(), "zeros": zeros.contiguous()}


def _gptq_shape(layer: PackedLayer) -> tuple[tuple[int, int], Weight, int]:
    rows, n = layer.sizes("qweight")
    return (n, rows * 32 // layer.bits), layer.tensor("scales"), layer.sizes("scales")[0]


def _gptq_parts(layer: PackedLayer) -> tuple[Tensor, Tensor, Tensor]:
    bits = layer.bits
    codes = columns(layer.tensor("qweight").load().T, bits)
    zeros = columns(layer.tensor("qzeros").load(), bits).T
    if layer.packing.one_less:
        zeros = (zeros + 1) & (2**bits - 1)
    return codes, layer.tensor("scales").load().T, zeros


def _awq_shape(layer: PackedLayer) -> tuple[tuple[int, int], Weight, int]:
    k, words = layer.sizes("qweight")
    layer.tensor("qzeros")
    return (words * 8, k), layer.tensor("scales"), layer.sizes("scales")[0]


def _awq_parts(layer: PackedLayer) -> tuple[Tensor, Tensor, Tensor]:
    def by_columns(name: str) -> Tensor:
        return fields(layer.tensor(name).load(), 4)[..., _AWQ_ORDER].flatten(-2)

    return by_columns("qweight").T.contiguous(), layer.tensor("scales").load().T, by_columns("qzeros").T


def _gemv_shape(layer: PackedLayer) -> tuple[tuple[int, int], Weight, int]:
    n, words = layer.sizes("qweight")
    layer.tensor("qzeros")
    return (n, words * 8), layer.tensor("scales"), words * 8 // layer.packing.group


def _gemv_parts(layer: PackedLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of words in order, those of scales and zeros padded."""
    groups = layer.shape[1] // layer.packing.group
    zeros = columns(layer.tensor("qzeros").load(), 4)[:, :groups]
    return columns(layer.tensor("qweight").load(), 4), layer.tensor("scales").load()[:, :groups], zeros


def _gemv_width(k: int, groups: int) -> int:
    """Words of zeros of a row: as many as it takes, in groups of 64 a multiple of 2 and in groups of 32 one of 4."""
    multiple = max(128 * groups // k, 1)
    return ceil(ceil(groups / 8) / multiple) * multiple


def _compressed_shape(layer: PackedLayer) -> tuple[tuple[int, int], Weight, int]:
    stated = layer.tensor("weight_shape")
    if stated.shape != (2,) or stated.dtype.is_floating_point:
        raise TensorError(f"{layer.layer}.weight_shape", f"is {list(stated.shape)}, not two sizes", _AGAIN)
    n, k = (int(size) for size in stated.load())
    layer.tensor("weight_packed")
    return (n, k), *_scales(layer)


def _scales(layer: PackedLayer) -> tuple[Weight, int]:
    """compressed-tensors' scales, and how many of them a row has; one may be all that there is."""
    scales = layer.tensor("weight_scale")
    return scales, 1 if prod(scales.shape) == 1 else layer.sizes("weight_scale")[1]


def _every_row(values: Tensor, n: int) -> Tensor:
    """Scales or zeros [N, groups], also of a layer that has one of them."""
    return values.reshape(1, 1).expand(n, 1) if values.numel() == 1 else values


def _compressed_parts(layer: PackedLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and zeros are stored without sign: 2^(bits - 1) more."""
    bits, (n, k) = layer.bits, layer.shape
    codes = columns(layer.tensor("weight_packed").load(), bits)[:, :k].contiguous()
    scales = _every_row(layer.tensor("weight_scale").load(), n)
    if "weight_zero_point" in layer.tensors:
        zeros = fields(layer.tensor("weight_zero_point").load().T, bits).flatten(-2).T[:n]
    else:
        zeros = torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.uint8)
    return codes, scales, zeros


def _int8_shape(layer: PackedLayer) -> tuple[tuple[int, int], Weight, int]:
    return layer.sizes("weight"), *_scales(layer)


def _int8_parts(layer: PackedLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and zeros are stored with their sign, of whatever bits they have."""
    codes = layer.tensor("weight").load().view(torch.uint8) ^ 128
    scales = _every_row(layer.tensor("weight_scale").load(), len(codes))
    if "weight_zero_point" not in layer.tensors:
        return codes, scales, torch.full(scales.shape, 128, dtype=torch.uint8)
    return codes, scales, _every_row(layer.tensor("weight_zero_point").load().view(torch.uint8) ^ 128, len(codes))


_WORDS, _BYTES, _REALS = (torch.int32,), (torch.int8,), tuple(_SCALES)
Expected = dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]]
# of a weight [n, k] with a number of groups and codes of `bits`: types and shape of each tensor
_EXPECTED: dict[str, Callable[[int, int, int, int], Expected]] = {
    "gptq": lambda n, k, groups, bits: {
        "qweight": (_WORDS, (k * bits // 32, n)), "qzeros": (_WORDS, (groups, n * bits // 32)),
        "scales": (_REALS, (groups, n)),
    },
    "awq": lambda n, k, groups, bits: {
        "qweight": (_WORDS, (k, n // 8)), "qzeros": (_WORDS, (groups, n // 8)), "scales": (_REALS, (groups, n)),
    },
    "gemv": lambda n, k, groups, bits: {
        "qweight": (_WORDS, (n, k // 8)), "qzeros": (_WORDS, (n, _gemv_width(k, groups))),
        "scales": (_REALS, (n, 8 * _gemv_width(k, groups))),
    },
    "compressed": lambda n, k, groups, bits: {
        "weight_packed": (_WORDS, (n, ceil(k * bits / 32))), "weight_scale": (_REALS, (n, groups)),
        "weight_zero_point": (_WORDS, (ceil(n * bits / 32), groups)),
    },
    "int8": lambda n, k, groups, bits: {
        "weight": (_BYTES, (n, k)), "weight_scale": (_REALS, (n, groups)), "weight_zero_point": (_BYTES, (n, groups)),
    },
}  # fmt: skip
_SHAPES: dict[str, Callable[[PackedLayer], tuple[tuple[int, int], Weight, int]]] = {
    "gptq": _gptq_shape, "awq": _awq_shape, "gemv": _gemv_shape, "compressed": _compressed_shape, "int8": _int8_shape,
}  # fmt: skip
_READERS: dict[str, Callable[[PackedLayer], tuple[Tensor, Tensor, Tensor]]] = {
    "gptq": _gptq_parts, "awq": _awq_parts, "gemv": _gemv_parts, "compressed": _compressed_parts, "int8": _int8_parts,
}  # fmt: skip
