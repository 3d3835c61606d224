"""Handles for weights that a file holds as integers with scales.

MatMulNBits, GatherBlockQuantized and DequantizeLinear read these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from onnx import NodeProto, helper
from torch import Tensor

from ....errors import TensorError
from ....weights.formats.base import Parts
from ....weights.formats.blocks import STEP, BlockFormat, grouped
from ....weights.handles import Derived, QuantizedWeight, Weight

_SHARED = ("MatMulNBits", "GatherBlockQuantized")  # ops whose weight is named by its codes
_SIGNED = (torch.int8,)  # dtypes of signed 4-bit codes


@dataclass
class NBits(QuantizedWeight):
    """The weight [N, K] of a MatMulNBits, or of a table: w = (code - zero) scale, per block along K."""

    codes: Weight  # [N, blocks, bytes of a block], or [N, bytes of a row]; or 4-bit integers [N, K], one per byte
    scales: Weight
    zeros: Weight | None
    bits: int
    shape: tuple[int, ...]
    format: BlockFormat
    dtype: torch.dtype = field(init=False, default=torch.float32)
    given: ClassVar[bool] = True

    def parts(self) -> Parts:
        """The codes [N, K], scales and zeros [N, blocks]; see QuantizedWeight."""
        n, k = self.shape
        blocks = k // self.format.size
        scales = self.scales.load().to(torch.float32).reshape(n, blocks)
        codes = self._codes(self.codes, k)
        if self.zeros is None:
            middle = 0 if is_halves(self.codes) and self.codes.dtype == torch.uint8 else 1 << (self.bits - 1)
            zeros = torch.full((n, blocks), middle, dtype=torch.uint8)
        else:
            zeros = self._codes(self.zeros, blocks)
        return {"codes": codes, "scales": scales, "zeros": zeros}

    def _codes(self, weight: Weight, width: int) -> Tensor:
        """Unsigned codes, uint8 [N, width]."""
        found = weight.load().reshape(self.shape[0], -1)
        if is_halves(weight):
            return (found.to(torch.int16) + 8).to(torch.uint8) if weight.dtype in _SIGNED else found
        return _unpacked(found, self.bits)[:, :width].contiguous()


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """The codes in bytes [.., n], lowest bits first: [.., n * 8 / bits]."""
    if bits == 8:
        return packed
    fields = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(fields, dim=-1).flatten(-2)


def without_reshapes(nodes: Sequence[NodeProto], tensors: Mapping[str, Weight]) -> list[NodeProto]:
    """The nodes without reshapes of packed codes: GatherBlockQuantized reads the codes in their stored shape."""
    stored = {n.output[0]: n.input[0] for n in nodes if n.op_type == "Reshape" and n.input[0] in tensors}
    found = []
    for node in nodes:
        if node.op_type == "GatherBlockQuantized" and node.input[0] in stored:
            copied = NodeProto()
            copied.CopyFrom(node)
            copied.input[0] = stored[node.input[0]]
            node = copied
        found.append(node)
    read = {name for node in found for name in node.input}
    return [n for n in found if not (n.op_type == "Reshape" and n.output[0] in stored and n.output[0] not in read)]


def packed_weights(nodes: Sequence[NodeProto], tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """The packed weights, by name.

    For a MatMulNBits or GatherBlockQuantized the name is that of its codes, and the weight stays packed. For a
    DequantizeLinear it is that of its output, which is computed at every load.
    """
    found: dict[str, Weight] = {}
    for node in sorted(nodes, key=lambda node: node.op_type != "MatMulNBits"):  # its attributes say the most
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        given = [tensors.get(name) for name in node.input]
        if node.op_type == "MatMulNBits":
            if given[1] is not None and given[2] is not None:
                found[node.input[1]] = _nbits(node, attributes, given)
        elif node.op_type == "GatherBlockQuantized":
            if given[0] is not None and given[2] is not None:
                found[node.input[0]] = _table(node, attributes, given, found.get(node.input[0]))
        elif node.op_type == "DequantizeLinear" and given[0] is not None and given[1] is not None:
            found[node.output[0]] = _dequantized(node, attributes, given)
    return found


def plain_reads(node: NodeProto, derived: Mapping[str, Weight]) -> list[str]:
    """The names that a node reads besides the parts of a packed weight."""
    if node.op_type in _SHARED and node.input[codes_of(node)] in derived:
        return [node.input[1]] if node.op_type == "GatherBlockQuantized" else [node.input[0], *node.input[5:]]
    return [] if node.op_type == "DequantizeLinear" and node.output[0] in derived else list(node.input)


def codes_of(node: NodeProto) -> int:
    """The index of the input of a MatMulNBits or GatherBlockQuantized that holds the codes."""
    return 0 if node.op_type == "GatherBlockQuantized" else 1


def is_halves(weight: Weight) -> bool:
    """Whether a weight holds 4-bit integers, which are loaded as one byte each."""
    return bool(getattr(weight, "halves", False))


def _table(node: NodeProto, attributes: Mapping[str, int], given: list[Weight | None], shared: Weight | None) -> Weight:
    """The table of a GatherBlockQuantized. shared: the same codes as the matrix of a MatMulNBits, or None. TensorError
    for an unknown form."""
    codes, scales, zeros, name = given[0], given[2], given[3] if len(given) > 3 else None, node.input[0]
    assert codes is not None and scales is not None
    if shared is not None:
        same = isinstance(shared, NBits) and shared.scales is scales and shared.zeros is zeros
        if not same:
            raise TensorError(name, "is read with other scales by another node", "icc has no such weight")
        return shared
    n, bits, block = codes.shape[0], int(attributes.get("bits", 4)), int(attributes.get("block_size", 128))
    bits = 4 if is_halves(codes) else bits
    k = _count(codes) // max(n, 1) * (1 if is_halves(codes) else 8 // bits)
    axes = int(attributes.get("gather_axis", 0)), int(attributes.get("quantize_axis", 1)) % len(codes.shape)
    if axes != (0, len(codes.shape) - 1) or bits not in (4, 8) or block < STEP or k % block:
        raise TensorError(name, f"has {bits} bits in blocks of {block} of an axis of {k}", "icc has no such format")
    wanted = n * (k // block)
    if _count(scales) != wanted or (zeros is not None and _count(zeros) not in (wanted, n * -(-k // block // 2))):
        raise TensorError(name, f"has {list(scales.shape)} where its shape says {wanted} scales")
    return NBits(codes, scales, zeros, bits, (n, k), grouped(bits, block, "f32"))


def _nbits(node: NodeProto, attributes: Mapping[str, int], given: list[Weight | None]) -> Weight:
    name = node.input[1]
    n, k, bits = int(attributes["N"]), int(attributes["K"]), int(attributes.get("bits", 4))
    block = int(attributes["block_size"])
    codes, scales, zeros = given[1], given[2], given[3] if len(given) > 3 else None
    assert codes is not None and scales is not None
    if (len(node.input) > 4 and node.input[4]) or (len(node.input) > 3 and node.input[3] and zeros is None):
        raise TensorError(name, "has columns in another order, or zero points that are computed")
    if bits not in (4, 8) or block < STEP or k % block or block * bits % 8:
        raise TensorError(name, f"has {bits} bits in blocks of {block} for K = {k}", "icc has no such format")
    blocks, per_byte = k // block, 8 // bits
    wanted = (n, blocks, block // per_byte)
    expected = [(codes, n * blocks * wanted[2]), (scales, n * blocks)]
    if zeros is not None:
        if zeros.dtype != torch.uint8:
            raise TensorError(name, f"has zero points of {zeros.dtype}", "icc reads packed integers")
        expected.append((zeros, n * -(-blocks // per_byte)))
    for weight, count in expected:
        if _count(weight) != count:
            raise TensorError(name, f"has {list(weight.shape)} where {wanted} says {count} values")
    return NBits(codes, scales, zeros, bits, (n, k), grouped(bits, block, "f32"))


def _count(weight: Weight) -> int:
    count = 1
    for size in weight.shape:
        count *= size
    return count


def _dequantized(node: NodeProto, attributes: Mapping[str, int], given: list[Weight | None]) -> Weight:
    """(x - zero) scale, per tensor, along an axis, or per block of it."""
    x, scale, zero = given[0], given[1], given[2] if len(given) > 2 else None
    assert x is not None and scale is not None
    axis, block = int(attributes.get("axis", 1)), int(attributes.get("block_size", 0))

    def spread(value: Tensor) -> Tensor:
        if value.dim() == 0 or value.numel() == 1:
            return value.reshape(())
        if block:
            return value.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
        shape = [1] * len(x.shape)
        shape[axis] = -1
        return value.reshape(shape)

    def compute(*values: Tensor) -> Tensor:
        codes, scales, *rest = values
        wide = codes.to(torch.float32)
        if rest:
            wide = wide - spread(rest[0].to(torch.float32))
        return wide * spread(scales.to(torch.float32))

    sources = (x, scale) if zero is None else (x, scale, zero)
    return Derived(compute, sources, tuple(x.shape), torch.float32)
