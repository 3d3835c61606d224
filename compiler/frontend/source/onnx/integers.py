"""Keeps the codes of matrices that a file holds as 8-bit or 4-bit integers for DequantizeLinear or for integer
products.

onnxruntime's quantizers write these. A product whose activations are quantized dynamically, by DynamicQuantizeLinear,
becomes a product with the same weights and without that quantization, which is not part of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from onnx import NodeProto, helper
from torch import Tensor

from ....quantization import GROUPS
from ....weights.formats.base import Parts
from ....weights.formats.blocks import STEP, BlockFormat, grouped
from ....weights.handles import QuantizedWeight, Weight
from ..float8 import Float8Layer
from .packed import is_halves

_SIGNED = {torch.int8: True, torch.uint8: False}
PRODUCT = "Linear"  # an op in the domain icc: (x, weight [N, K], bias)
_FUSED = ("DynamicQuantizeMatMul", "MatMulIntegerToFloat")


@dataclass
class Integers(QuantizedWeight):
    """A weight [N, K] from codes [N, K], or [K, N] if `turned` (transposed): w = (code - zero) scale.

    scales: one for all, [N], or one per block of K. zeros: as scales; None: 0.
    """

    codes: Weight
    scales: Weight
    zeros: Weight | None
    turned: bool
    shape: tuple[int, ...]
    format: BlockFormat
    dtype: torch.dtype = field(init=False, default=torch.float32)
    given: ClassVar[bool] = True

    def parts(self) -> Parts:
        """The codes as bytes, and a scale and a zero per group; see QuantizedWeight."""
        scales = self._spread(self.scales.load().to(torch.float32))
        zeros = torch.zeros((), dtype=self.codes.dtype) if self.zeros is None else self.zeros.load()
        return {"codes": self._turned(self._unsigned(self.codes.load())), "scales": scales,
                "zeros": self._spread(self._unsigned(zeros))}  # fmt: skip

    def _unsigned(self, values: Tensor) -> Tensor:
        middle = 1 << (self.format.bits - 1)
        return (values.to(torch.int16) + middle).to(torch.uint8) if _SIGNED[self.codes.dtype] else values

    def _turned(self, values: Tensor) -> Tensor:
        return values.t().contiguous() if self.turned else values

    def _spread(self, values: Tensor) -> Tensor:
        """Scales or zeros, repeated to one value per block of the format, [N, K / group]."""
        n, k = self.shape
        own = self._turned(values) if values.dim() == 2 else values.reshape(-1, 1)
        return own.expand(n, k // self.format.group).contiguous()


def integers(codes: Weight | None, scales: Weight | None, zeros: Weight | None, turned: bool, axis: int,
             block: int) -> QuantizedWeight | None:  # fmt: skip
    """The weight for a matrix of integers or of e4m3; None if icc has no format for it.

    axis: the axis of the codes along which scales differ. block: number of codes along it that share a scale; 0: one
    scale per index.
    """
    if codes is not None and scales is not None and codes.dtype == torch.float8_e4m3fn:
        return _floats(codes, scales) if zeros is None and not turned and (block or not scales.shape) else None
    if codes is None or scales is None or len(codes.shape) != 2 or codes.dtype not in _SIGNED:
        return None
    (n, k), bits = (codes.shape[::-1] if turned else codes.shape), 4 if is_halves(codes) else 8
    rows = 1 if turned else 0
    own, whole = tuple(scales.shape), tuple(codes.shape)
    if block:
        axis %= 2
        group = block if axis != rows and k % block == 0 and block % STEP == 0 else 0
        wanted = tuple(size // block if i == axis else size for i, size in enumerate(whole))
    else:
        group = next((g for g in GROUPS if k % g == 0), 0)
        single = own in ((), (1,))
        wanted = own if single else (n,) if axis % 2 == rows else ()
    if not group or own != wanted or (zeros is not None and (tuple(zeros.shape), zeros.dtype) != (own, codes.dtype)):
        return None
    return Integers(codes, scales, zeros, turned, (n, k), grouped(bits, group, "f32"))


def _floats(codes: Weight, scales: Weight) -> Float8Layer | None:
    """8-bit floats [N, K] with one scale, or with scales for blocks along K; None for other scales."""
    whole = len(codes.shape) == 2 and (not scales.shape or scales.shape[0] == codes.shape[0])
    return Float8Layer("e4m3", codes, scales, alone=True) if whole else None


def stored_integers(
    nodes: Sequence[NodeProto], tensors: Mapping[str, Weight]
) -> tuple[list[NodeProto], dict[str, Weight]]:
    """The nodes, with products and lookups of weights in place of integer computations, and these weights by the names
    that such nodes read."""
    reading = _Reading(nodes, tensors)
    kept = [reading.rewritten(node) for node in nodes]
    return kept, reading.found


class _Reading:
    def __init__(self, nodes: Sequence[NodeProto], tensors: Mapping[str, Weight]) -> None:
        self.found: dict[str, Weight] = {}
        self._tensors = tensors
        self._makers = {name: node for node in nodes for name in node.output if name}
        self._readers: dict[str, list[NodeProto]] = {}
        for node in nodes:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        self._products: dict[str, str] = {}  # operand of a MatMul -> the weight that it is
        for node in nodes:
            if node.op_type == "DequantizeLinear" and node.input[0] in tensors:
                self._matrix(node)

    def rewritten(self, node: NodeProto) -> NodeProto:
        """The node, or its replacement."""
        if node.op_type == "MatMul" and node.input[1] in self._products:
            return _product(node, node.input[0], self._products[node.input[1]])
        if node.op_type == "Mul":
            return self._scaled(node)
        if node.op_type in _FUSED:
            return self._fused(node)
        if node.op_type == "DequantizeLinear":
            return self._looked_up(node)
        return node

    def _weight(self, node: NodeProto, index: int) -> Weight | None:
        return self._tensors.get(node.input[index]) if len(node.input) > index else None

    def _lacks(self, node: NodeProto, index: int) -> bool:
        """Whether an operand is given and is not a constant."""
        return len(node.input) > index and bool(node.input[index]) and node.input[index] not in self._tensors

    def _matrix(self, node: NodeProto) -> None:
        """Take a DequantizeLinear of a matrix that only products read, or of a table."""
        if self._lacks(node, 1) or self._lacks(node, 2):
            return
        (output,) = node.output
        readers = self._readers.get(output, [])
        turned, names = False, [output]
        if readers and all(r.op_type == "MatMul" and r.input[1] == output for r in readers):
            turned = True
        elif readers and all(r.op_type == "Transpose" for r in readers):
            names = [r.output[0] for r in readers]
            users = [(u, name) for name in names for u in self._readers.get(name, [])]
            if not users or any(u.op_type != "MatMul" or u.input[1] != name for u, name in users):
                return
        elif not readers or not all(_takes_rows(r, output) for r in readers):
            return
        stated = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        weight = integers(self._weight(node, 0), self._weight(node, 1), self._weight(node, 2), turned,
                          int(stated.get("axis", 1)), int(stated.get("block_size", 0)))  # fmt: skip
        if weight is not None:
            self.found[output] = weight
            self._products |= {name: output for name in names if turned or name != output}

    def _quantized(self, name: str) -> NodeProto | None:
        """The DynamicQuantizeLinear that computes a value; None if another op does."""
        node = self._makers.get(name)
        return node if node is not None and node.op_type == "DynamicQuantizeLinear" else None

    def _scaled(self, node: NodeProto) -> NodeProto:
        """Replace MatMulInteger, Cast, and `node`: a Mul with (scale of the rows) (scale of the weight, or of other
        rows)."""
        for product, scale in (tuple(node.input), tuple(node.input)[::-1]):
            cast, factor = self._makers.get(product), self._makers.get(scale)
            if cast is None or factor is None or (cast.op_type, factor.op_type) != ("Cast", "Mul"):
                continue
            found = self._makers.get(cast.input[0])
            if found is None or found.op_type != "MatMulInteger":
                continue
            rows, other = self._quantized(found.input[0]), self._quantized(found.input[1])
            if rows is not None and other is not None and set(factor.input) == {rows.output[1], other.output[1]}:
                return helper.make_node("MatMul", [rows.input[0], other.input[0]], list(node.output), name=found.name)
            own = [name for name in factor.input if name in self._tensors]
            if rows is None or len(own) != 1 or rows.output[1] not in factor.input or self._lacks(found, 3):
                continue
            weight = integers(self._weight(found, 1), self._tensors[own[0]], self._weight(found, 3), True, 1, 0)
            if weight is not None:
                return self._taken(node, rows.input[0], found.input[1], weight)
        return node

    def _fused(self, node: NodeProto) -> NodeProto:
        """Replace a fused op on (x, weight, scale, zero, bias), or (codes of x, weight, scale of x, scale, zero of x,
        zero, bias)."""
        whole = node.op_type == "DynamicQuantizeMatMul"
        rows = None if whole else self._quantized(node.input[0])
        scale, zero, bias = (2, 3, 4) if whole else (3, 5, 6)
        if (not whole and rows is None) or self._lacks(node, zero):
            return node
        weight = integers(self._weight(node, 1), self._weight(node, scale), self._weight(node, zero), True, 1, 0)
        if weight is None:
            return node
        given = node.input[bias] if len(node.input) > bias else ""
        return self._taken(node, node.input[0] if rows is None else rows.input[0], node.input[1], weight, given)

    def _taken(self, node: NodeProto, rows: str, name: str, weight: QuantizedWeight, bias: str = "") -> NodeProto:
        self.found[name] = weight
        return _product(node, rows, name, bias)

    def _looked_up(self, node: NodeProto) -> NodeProto:
        """Replace a DequantizeLinear of rows that were gathered from a table of integers."""
        taken = self._makers.get(node.input[0])
        if taken is None or taken.op_type != "Gather" or self._lacks(node, 1) or self._lacks(node, 2):
            return node
        codes = self._tensors.get(taken.input[0])
        if codes is None or not _takes_rows(taken, taken.input[0]):
            return node
        scales = self._weight(node, 1)
        if scales is None or tuple(scales.shape) not in ((), (1,)):
            return node
        weight = integers(codes, scales, self._weight(node, 2), False, 0, 0)
        if weight is None:
            return node
        self.found[taken.input[0]] = weight
        return helper.make_node("Gather", list(taken.input), list(node.output), name=taken.name, axis=0)


def _takes_rows(node: NodeProto, table: str) -> bool:
    stated = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "Gemm":
        return (
            node.input[1] == table and bool(stated.get("transB", 0)) and table not in (node.input[0], *node.input[2:])
        )
    return node.op_type == "Gather" and node.input[0] == table and stated.get("axis", 0) == 0


def _product(node: NodeProto, rows: str, weight: str, bias: str = "") -> NodeProto:
    """A product with a weight [N, K] in place of a node."""
    inputs = [rows, weight, bias] if bias else [rows, weight]
    made = helper.make_node(PRODUCT, inputs, [node.output[0]], name=node.name, domain="icc")
    made.metadata_props.extend(node.metadata_props)
    return made
