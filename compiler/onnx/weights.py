"""Writes weights as initializers: in their own dtype, or as the parts of their storage format with nodes that decode
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..weights.formats.affine import GroupAffine
from ..weights.formats.base import Parts, StorageFormat
from ..weights.formats.blocks import BlockFormat
from ..weights.formats.channel import ZERO, ChannelInt8
from ..weights.formats.dense import Dense
from ..weights.formats.float8 import Float8, e4m3_values
from ..weights.formats.reduced import ReducedInt8
from ..weights.handles import Weight
from .builder import MICROSOFT, TYPES, Builder, Initializer, StoredInitializers


@dataclass(frozen=True)
class Affine:
    """A format of MatMulNBits: w = (code - zero) scale, with `bits` bits per code, and one scale per `block` values
    along K."""

    bits: int
    block: int
    zero: int | None  # zero of all blocks; None if each has its own

    @staticmethod
    def of(storage: StorageFormat) -> Affine | None:
        """A storage format as Affine; None if it has another form."""
        if type(storage) is GroupAffine and storage.bits in (4, 8):
            return Affine(storage.bits, storage.group, None)
        if type(storage) is ReducedInt8:
            return Affine(storage.bits, storage.group, ZERO)
        if type(storage) is not BlockFormat or storage.table or storage.mins or storage.power:
            return None
        if storage.group_scales != "none" or storage.bits not in (4, 8):
            return None
        return Affine(storage.bits, storage.size, None if storage.zeros else storage.zero)

    @property
    def is_contributed(self) -> bool:
        """Whether onnxruntime's MatMulNBits and GatherBlockQuantized accept blocks of this size."""
        return self.block >= 16 and not self.block & (self.block - 1)

    def scales(self, storage: StorageFormat, parts: Parts) -> Tensor:
        """float32 [..., N, K / block]."""
        factor = storage.factor if isinstance(storage, BlockFormat) else 1.0
        return parts["scales"].to(torch.float32) * factor


class Weights:
    """The weights of a graph as ONNX values. Each is stored once, in the form that its uses need."""

    def __init__(self, builder: Builder, notes: dict[str, int]) -> None:
        self._b = builder
        self._notes = notes
        self._stored: dict[int, dict[str, str]] = {}
        self._kept: list[Weight] = []  # keeps weights alive, so that their ids are not reused

    def value(self, weight: Weight, name: str) -> str:
        """The whole weight; floats as float32."""
        owner = name.rpartition(".")[0]
        return self._b.once(("value", id(weight)), lambda: self._decoded(weight, name, None), owner)

    def rows(self, weight: Weight, name: str, index: str) -> str:
        """weight[index] along the first axis; floats as float32. Only these rows are decoded, by nodes in the current
        module."""
        affine = Affine.of(weight.storage)
        if affine is None or not affine.is_contributed or len(weight.shape) != 2:
            return self._decoded(weight, name, index)
        stored, (n, _) = self._packed(weight, name, affine), weight.shape
        # codes in MatMulNBits' form, which the LM head may share
        table = self._b.once(
            ("table", id(weight)), lambda: self._b.reshape(stored["codes"], n, -1), name.rpartition(".")[0]
        )
        zeros = [stored["zeros"]] if "zeros" in stored else []
        return self._b.add(
            "GatherBlockQuantized", table, index, stored["scales"], *zeros,
            domain=MICROSOFT, bits=affine.bits, block_size=affine.block, gather_axis=0, quantize_axis=1,
        )  # fmt: skip

    def product(self, weight: Weight, name: str, x: str, bias: str) -> str | None:
        """x[..., K] times the transpose of a weight [N, K] of 4-bit or 8-bit codes; None for other weights."""
        affine = Affine.of(weight.storage)
        if affine is None or len(weight.shape) != 2 or not affine.is_contributed:
            return None
        stored = self._packed(weight, name, affine)
        n, k = weight.shape
        return self._b.add(
            "MatMulNBits", x, stored["codes"], stored["scales"], stored.get("zeros", ""), "", bias,
            domain=MICROSOFT, K=k, N=n, bits=affine.bits, block_size=affine.block,
        )  # fmt: skip

    def _decoded(self, weight: Weight, name: str, index: str | None) -> str:
        """The weight, or its rows at `index` (None: all), as float32; integers are not converted."""
        storage, b = weight.storage, self._b
        dtype = torch.float32 if weight.dtype.is_floating_point else weight.dtype

        def take(value: str) -> str:
            return value if index is None else b.add("Gather", value, index, axis=0)

        affine = Affine.of(storage)
        if affine is not None and affine.block % 2 == 0:
            return self._affine(weight, affine, {k: take(v) for k, v in self._packed(weight, name, affine).items()})
        if type(storage) is BlockFormat:
            stored = self._blocks(weight, name, storage)
            return self._of_blocks(weight, storage, {k: take(v) for k, v in stored.items()})
        if type(storage) in (ChannelInt8, Float8):
            return self._scaled_rows(weight, name, index)
        if not isinstance(storage, Dense):  # an unknown format, such as another package's: stored decoded
            self._notes[storage.name] = self._notes.get(storage.name, 0) + 1
        held = storage.dtype if isinstance(storage, Dense) and storage.dtype in TYPES else dtype
        stored = self._store(weight, name, {"": (weight.shape, held)}, lambda: [weight.load().to(held)])
        return take(stored[""]) if held == dtype else b.cast(take(stored[""]), dtype)

    def _packed(self, weight: Weight, name: str, affine: Affine) -> dict[str, str]:
        """The parts in MatMulNBits' form: codes uint8 [..., N, blocks, bytes of a block], scales float32 [..., N,
        blocks], and zeros, packed along the blocks, unless all are the middle of the range of codes."""
        *lead, k = weight.shape
        storage, blocks, per_byte = weight.storage, k // affine.block, 8 // affine.bits
        arrays = {
            "codes": ((*lead, blocks, affine.block // per_byte), torch.uint8),
            "scales": ((*lead, blocks), torch.float32),
        }
        if affine.zero != 1 << (affine.bits - 1):
            arrays["zeros"] = ((*lead, -(-blocks // per_byte)), torch.uint8)

        def load() -> list[Tensor]:
            parts = weight.parts()
            found = [_pack(parts["codes"], affine.bits).reshape(arrays["codes"][0]), affine.scales(storage, parts)]
            if "zeros" in arrays:
                own = affine.zero is None
                zeros = parts["zeros"] if own else torch.full(found[1].shape, affine.zero, dtype=torch.uint8)  # type: ignore[arg-type]
                found.append(_pack(zeros, affine.bits))
            return found

        return self._store(weight, name, arrays, load)

    def _affine(self, weight: Weight, affine: Affine, stored: dict[str, str]) -> str:
        """(code - zero) scale, computed from packed parts."""
        b, k = self._b, weight.shape[-1]
        narrow = affine.bits == 4
        codes = b.cast(_unpacked(b, stored["codes"]) if narrow else stored["codes"], torch.float32)
        if "zeros" not in stored:
            zeros = b.number(1 << (affine.bits - 1))
        else:
            zeros = stored["zeros"]
            if narrow:
                zeros = _unpacked(b, zeros)
                if k // affine.block % 2:  # the last byte has one unused code
                    zeros = b.add("Slice", zeros, b.ints(0), b.ints(k // affine.block), b.ints(-1))
            zeros = b.add("Unsqueeze", b.cast(zeros, torch.float32), b.ints(-1))
        scales = b.add("Unsqueeze", stored["scales"], b.ints(-1))
        return _joined(b, b.add("Mul", b.add("Sub", codes, zeros), scales))

    def _scaled_rows(self, weight: Weight, name: str, index: str | None) -> str:
        """DequantizeLinear of int8 or e4m3 codes with a scale per row, or per block of a row. index: of rows; None:
        all.

        Gather does not accept e4m3: stacked matrices, of which rows are read, have uint8 codes whose values are looked
        up.
        """
        b, form, (*lead, k) = self._b, weight.storage, weight.shape
        floats, blocks = type(form) is Float8, form.arrays(weight.shape)["scales"].shape[-1]
        looked_up = floats and len(lead) > 1
        kind = torch.uint8 if looked_up else torch.float8_e4m3fn if floats else torch.int8
        arrays = {"codes": (weight.shape, kind), "scales": ((*lead, blocks), torch.float32)}

        def load() -> list[Tensor]:
            parts = weight.parts()
            codes = parts["codes"].contiguous()
            return [codes.view(kind) if floats else (codes.to(torch.int16) - ZERO).to(kind), parts["scales"]]

        stored = self._store(weight, name, arrays, load)
        if floats and not looked_up and index is not None:
            return b.add("Gather", self.value(weight, name), index, axis=0)
        codes, scales = (v if index is None else b.add("Gather", v, index, axis=0) for v in stored.values())
        group = form.group or k  # type: ignore[attr-defined]
        if not looked_up:
            return b.add("DequantizeLinear", codes, scales, axis=-1, block_size=group)

        def constant(name: str, values: Tensor) -> str:
            return b.once(name, lambda: b.store(b.unique(f"constant/{name}"), values))

        levels = constant("e4m3", e4m3_values(torch.arange(256, dtype=torch.uint8)))
        values = b.add("Gather", levels, b.cast(codes, torch.int64), axis=0)
        if blocks > 1:
            scales = b.add("Gather", scales, constant(f"block[{k}, {group}]", torch.arange(k) // group), axis=-1)
        return b.add("Mul", values, scales)

    def _blocks(self, weight: Weight, name: str, storage: BlockFormat) -> dict[str, str]:
        """Codes uint8 [..., N, groups, group], two per byte if they fit; scales, zeros and offsets [..., N, groups,
        1]."""
        *lead, k = weight.shape
        group, halves = storage.group, _halves(storage)
        spread = (*lead, k // group, 1)
        arrays = {
            "codes": ((*lead, k // group, group // 2 if halves else group), torch.uint8),
            "scales": (spread, torch.float32),
        }
        if storage.zeros:
            arrays["zeros"] = (spread, torch.uint8)
        if storage.mins:
            arrays["offsets"] = (spread, torch.float32)

        def load() -> list[Tensor]:
            parts = weight.parts()
            codes = parts["codes"].unflatten(-1, (-1, group))
            scale, offset = storage.levels_of(parts)
            zeros = [parts["zeros"].repeat_interleave(storage.size // group, -1)] if storage.zeros else []
            found = [scale, *zeros, *([] if offset is None else [offset])]
            return [_pack(codes, 4) if halves else codes, *(value.unsqueeze(-1) for value in found)]

        return self._store(weight, name, arrays, load)

    def _of_blocks(self, weight: Weight, storage: BlockFormat, stored: dict[str, str]) -> str:
        """The values of codes times scales, minus offsets."""
        b = self._b
        codes = _unpacked(b, stored["codes"]) if _halves(storage) else stored["codes"]
        if storage.table:
            levels = b.constant([float(v) for v in storage.table], torch.float32)
            value = b.add("Gather", levels, b.cast(codes, torch.int64), axis=0)
        else:
            value = b.cast(codes, torch.float32)
            if storage.zeros:
                value = b.add("Sub", value, b.cast(stored["zeros"], torch.float32))
            elif storage.zero:
                value = b.add("Sub", value, b.number(storage.zero))
        value = b.add("Mul", value, stored["scales"])
        return _joined(b, b.add("Sub", value, stored["offsets"]) if storage.mins else value)

    def _store(
        self,
        weight: Weight,
        name: str,
        arrays: dict[str, tuple[tuple[int, ...], torch.dtype]],
        load: Callable[[], list[Tensor]],
    ) -> dict[str, str]:
        """Add a weight's initializers, and return their names by part."""
        key = id(weight)
        if key not in self._stored:
            self._kept.append(weight)
            named = [
                Initializer(self._b.unique(f"{name}.{part}" if part else name), dtype, tuple(shape))
                for part, (shape, dtype) in arrays.items()
            ]
            self._b.stored.append(StoredInitializers(tuple(named), load))
            self._stored[key] = dict(zip(arrays, (item.name for item in named), strict=True))
        return self._stored[key]


def _pack(codes: Tensor, bits: int) -> Tensor:
    """4-bit codes uint8 [.., n] as bytes [.., n / 2], the first of each pair in the low half; 8-bit codes unchanged."""
    if bits == 8:
        return codes
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _halves(storage: BlockFormat) -> bool:
    return storage.bits == 4 and storage.group % 2 == 0


def _joined(b: Builder, value: str) -> str:
    """The value with its last two axes merged."""
    return b.add("Reshape", value, b.add("Concat", b.add("Shape", value, end=-2), b.ints(-1), axis=0))


def _unpacked(b: Builder, packed: str) -> str:
    """The codes of bytes that hold two codes each along the last axis."""
    low = b.add("BitwiseAnd", packed, b.constant(15, torch.uint8))
    high = b.add("BitShift", packed, b.constant(4, torch.uint8), direction="RIGHT")
    return _joined(b, b.add("Concat", *(b.add("Unsqueeze", half, b.ints(-1)) for half in (low, high)), axis=-1))
