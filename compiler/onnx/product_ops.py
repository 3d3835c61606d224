"""Writes products."""

from __future__ import annotations

import torch
from onnx import TensorProto, helper
from torch import fx

from ..graph.tensor_types import type_of
from ..ops.hadamard import walsh_hadamard
from .writer import Table, Writer

HANDLERS = Table()


@HANDLERS.handles("linear")
def _linear(w: Writer, node: fx.Node) -> str:
    x, weight, bias = node.args
    value, added = w.value(x), w.value(bias)
    if weight.op == "get_attr":  # type: ignore[union-attr]
        found = w.weights.product(w.graph.weight(weight), str(weight.target), value, added)  # type: ignore[arg-type, union-attr]
        if found is not None:
            return found
    matrix = w.value(weight)
    if type_of(x).rank == 2:  # type: ignore[arg-type]
        return w.b.add("Gemm", value, matrix, added, transB=1)
    turned = w.b.once(("transposed", matrix), lambda: w.b.add("Transpose", matrix, perm=[1, 0]), w.b.module)
    product = w.b.add("MatMul", value, turned)
    return w.b.add("Add", product, added) if added else product


@HANDLERS.handles("expert_linear")
def _expert_linear(w: Writer, node: fx.Node) -> str:
    """A Loop over the experts. Each gathers its tokens, and adds nothing if it has none."""
    x, weight, bias, index = node.args
    experts, n, _ = type_of(weight).shape  # type: ignore[arg-type]
    b = w.b
    if index is None:  # each token has one row per expert
        rows = b.add("Transpose", w.value(x), perm=[1, 0, 2])
        result = b.add("MatMul", rows, b.add("Transpose", w.value(weight), perm=[0, 2, 1]))
        result = b.add("Transpose", result, perm=[1, 0, 2])
        return result if bias is None else b.add("Add", result, w.value(bias))
    value, places = w.value(x), b.cast(w.value(index), torch.int64)
    empty = b.add("Expand", b.number(0.0), b.add("Concat", b.add("Shape", places), b.ints(n), axis=0))
    with b.body() as nodes:
        expert, go, so_far = (b.unique(f"{b.module or 'experts'}/{name}") for name in ("expert", "go", "so_far"))
        pairs = b.add("Transpose", b.add("NonZero", b.add("Equal", places, expert)), perm=[1, 0])
        if type_of(x).rank == 2:  # type: ignore[arg-type]
            token = b.add("Slice", pairs, b.ints(0), b.ints(1), b.ints(1))
            rows = b.add("GatherND", value, token)
        else:
            rows = b.add("GatherND", value, pairs)
        matrix = b.add("Transpose", w.rows_of(weight, expert), perm=[1, 0])  # type: ignore[arg-type]
        result = b.add("MatMul", rows, matrix)
        if bias is not None:
            result = b.add("Add", result, w.rows_of(bias, expert))  # type: ignore[arg-type]
        after = b.add("ScatterND", so_far, pairs, result)
        goes_on = b.add("Identity", go)
    info = helper.make_tensor_value_info
    body = b.subgraph(
        nodes,
        [
            info(expert, TensorProto.INT64, []),
            info(go, TensorProto.BOOL, []),
            info(so_far, TensorProto.FLOAT, [None] * 3),
        ],
        [info(goes_on, TensorProto.BOOL, []), info(after, TensorProto.FLOAT, [None] * 3)],
    )
    return b.add("Loop", b.constant(experts, torch.int64), b.constant(True, torch.bool), empty, body=body)


@HANDLERS.handles("hadamard")
def _hadamard(w: Writer, node: fx.Node) -> str:
    """A product with the whole Hadamard matrix, stored once per size."""
    x, block = node.args

    def matrix() -> str:
        return w.b.store(w.b.unique(f"constant/hadamard[{block}]"), walsh_hadamard(torch.eye(block)))  # type: ignore[call-overload]

    *outer, width = type_of(x).shape  # type: ignore[arg-type]
    blocks = w.b.reshape(w.value(x), -1, *outer, width // block, block)  # type: ignore[operator]
    return w.b.reshape(w.b.add("MatMul", blocks, w.b.once(("hadamard", block), matrix)), -1, *outer, width)


@HANDLERS.handles("bmm")
def _bmm(w: Writer, node: fx.Node) -> str:
    return w.b.add("MatMul", *map(w.value, node.args))
