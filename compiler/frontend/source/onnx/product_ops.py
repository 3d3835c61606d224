"""Handlers of products, and of ops on packed weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .errors import Refused
from .integers import PRODUCT
from .table import OnnxCall, Table

HANDLERS = Table()


@HANDLERS.handles("MatMul", "com.microsoft.FusedMatMul")
def matmul(c: OnnxCall) -> Any:
    """MatMul and onnxruntime's FusedMatMul: alpha a b, each of which may be transposed."""
    a, b = c.tensor(0), c.tensor(1)
    if c.attribute("transA", 0):
        a = a.transpose(-1, -2)
    if c.attribute("transB", 0):
        b = b.transpose(-1, -2)
    if c.weights[1] and b.dim() == 2:
        result = functional.linear(a, b.t())
    else:
        result = torch.matmul(a, b)
    alpha = c.attribute("alpha", 1.0)
    return result if alpha == 1.0 else result * alpha


@HANDLERS.handles("Gemm")
def gemm(c: OnnxCall) -> Any:
    """Gemm: alpha a b + beta bias, of matrices that may be transposed."""
    a, b, bias = c.tensor(0), c.tensor(1), c.given(2)
    alpha, beta = c.attribute("alpha", 1.0), c.attribute("beta", 1.0)
    a = a.t() if c.attribute("transA", 0) else a
    b = b if c.attribute("transB", 0) else b.t()
    plain = bias is None or (alpha == 1.0 and beta == 1.0 and c.as_tensor(bias).dim() == 1)
    if plain:
        result = functional.linear(a, b, None if bias is None else c.as_tensor(bias))
        return result if alpha == 1.0 else result * alpha
    result = functional.linear(a, b)
    result = result if alpha == 1.0 else result * alpha
    return result + (c.as_tensor(bias) if beta == 1.0 else c.as_tensor(bias) * beta)


@HANDLERS.handles("com.microsoft.MatMulNBits")
def matmul_nbits(c: OnnxCall) -> Any:
    """MatMulNBits: a product with a packed weight, which is a float tensor on meta here. Refused if the weight is no
    constant."""
    weight = c.given(1)
    if not c.weights[1] or not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise Refused("packed weights that are no constants")
    bias = c.given(5)
    return functional.linear(c.tensor(0), weight, None if bias is None else c.as_tensor(bias))


@HANDLERS.handles(f"icc.{PRODUCT}")
def linear(c: OnnxCall) -> Any:
    """Linear: x [.., K] by a weight [N, K], and a bias [N] or none; the op is made by `stored_integers`."""
    return functional.linear(c.tensor(0), c.tensor(1), None if c.given(2) is None else c.tensor(2))


@HANDLERS.handles("com.microsoft.GatherBlockQuantized")
def gather_packed(c: OnnxCall) -> Any:
    """GatherBlockQuantized: rows of a packed table. Refused if the table is no constant."""
    table = c.given(0)
    if not c.weights[0] or not isinstance(table, Tensor) or not table.is_floating_point():
        raise Refused("a packed table that is no constant")
    return functional.embedding(c.tensor(1), table)


@HANDLERS.handles("DequantizeLinear")
def dequantize(c: OnnxCall) -> Any:
    """Raise Refused: a DequantizeLinear of weights was replaced by a weight before, so this one is of activations."""
    raise Refused("quantized activations: icc reads files with quantized weights")


@HANDLERS.handles("DynamicQuantizeLinear", "QuantizeLinear", "MatMulInteger", "QLinearMatMul")
def quantized(c: OnnxCall) -> Any:
    """Raise Refused: activations are quantized, and `stored_integers` did not replace this op."""
    raise Refused("quantized activations: give the file with float or MatMulNBits weights")
