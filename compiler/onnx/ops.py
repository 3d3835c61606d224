"""How each op of the dialect is written in ONNX. One small function per op; anything without one is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from onnx import TensorProto, helper
from torch import fx

from ..errors import ExportError
from ..graph.graph import Graph, TensorType, type_of
from ..graph.printer import target_name
from ..ops import op_of
from ..ops.body import Argument, Body, BodyWriter
from .attention import Extras, Heads, Sequences, attention, rotate, split
from .builder import Builder
from .pointwise import Typed, emit_body
from .weights import Weights


@dataclass
class Writer:
    """What is known while a graph is written: the ONNX value of each node, or a list of several."""

    graph: Graph
    b: Builder
    weights: Weights
    sequences: Sequences
    values: dict[fx.Node, Any] = field(default_factory=dict)

    def value(self, arg: Any) -> str:
        """The ONNX value of an operand; "" for an absent one."""
        if arg is None:
            return ""
        if arg.op == "get_attr":
            return self.weights.value(self.graph.weight(arg), str(arg.target))
        return self.values[arg]

    def rows_of(self, arg: fx.Node, index: str) -> str:
        """arg[index] along the first axis; of a weight only those rows are decoded."""
        if arg.op == "get_attr":
            return self.weights.rows(self.graph.weight(arg), str(arg.target), index)
        return self.b.add("Gather", self.value(arg), index, axis=0)

    def call(self, node: fx.Node) -> None:
        """Write one call."""
        module = str(node.meta.get("module", ""))
        name = target_name(node.target)
        with self.b.at(module):
            try:
                self.values[node] = self._written(node, name)
            except ValueError as error:
                where = f" in module {module!r}" if module else ""
                raise ExportError(f"{name}{where} cannot be written in ONNX: {error}") from error

    def _written(self, node: fx.Node, name: str) -> Any:
        declared = op_of(node.target)
        if (handler := _HANDLERS.get(name if declared is None else declared.name)) is not None:
            return handler(self, node)
        if declared is None or declared.instructions is None:
            raise ValueError("there is no translation of the op")
        return _elementwise(self, node, declared.instructions)


Handler = Callable[[Writer, fx.Node], Any]
_HANDLERS: dict[str, Handler] = {}


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def declare(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return declare


def _typed(w: Writer, arg: fx.Node) -> Typed:
    return Typed(w.value(arg), type_of(arg).meta())


def _finished(w: Writer, found: Typed, wanted: TensorType) -> str:
    """A body's result in the type that the graph says: all rows, and not only int32."""
    name = found.name if found.meta.dtype == wanted.dtype else w.b.cast(found.name, wanted.dtype)
    if tuple(found.meta.shape) == tuple(wanted.meta().shape):
        return name
    if wanted.rows is not None and (not found.meta.shape or found.meta.dim() < wanted.rank):
        raise ValueError("a body that does not depend on the tokens")
    return w.b.add("Expand", name, w.b.ints(*(1 if s == -1 else s for s in wanted.full_shape)))


def _elementwise(w: Writer, node: fx.Node, instructions: Any) -> str:
    write, inputs = BodyWriter(), []
    floats = any(type_of(n).dtype.is_floating_point for n in node.all_input_nodes)

    def operand(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            if arg not in inputs:
                inputs.append(arg)
            return Argument(inputs.index(arg))
        return float(arg) if floats and type(arg) is int else arg

    body = write.finish(instructions(write, *(operand(a) for a in node.args)))
    return _finished(w, emit_body(w.b, body, [_typed(w, n) for n in inputs]), type_of(node))


@_handles("pointwise")
def _pointwise(w: Writer, node: fx.Node) -> str:
    inputs, text = node.args
    found = emit_body(w.b, Body.parse(str(text)), [_typed(w, n) for n in inputs])  # type: ignore[union-attr]
    return _finished(w, found, type_of(node))


@_handles("getitem")
def _getitem(w: Writer, node: fx.Node) -> str:
    source, index = node.args
    return w.values[source][index]  # type: ignore[index]


@_handles("aten.view")
def _view(w: Writer, node: fx.Node) -> str:
    return w.b.reshape(w.value(node.args[0]), *type_of(node).full_shape)


@_handles("aten.permute")
def _permute(w: Writer, node: fx.Node) -> str:
    x, order = node.args
    rank = type_of(node).rank
    return w.b.add("Transpose", w.value(x), perm=[int(d) % rank for d in order])  # type: ignore[union-attr]


@_handles("aten.expand")
def _expand(w: Writer, node: fx.Node) -> str:
    return w.b.add("Expand", w.value(node.args[0]), w.b.ints(*(max(1, s) for s in type_of(node).full_shape)))


@_handles("aten.slice")
def _slice(w: Writer, node: fx.Node) -> str:
    x, axis, start, end, *rest = node.args
    limit = 2**63 - 1
    bounds = [int(start or 0), limit if end is None else int(end), int(axis or 0), int(rest[0]) if rest else 1]  # type: ignore[arg-type]
    start, end, axis, step = (w.b.ints(v) for v in bounds)
    return w.b.add("Slice", w.value(x), start, end, axis, step)


@_handles("aten.cat")
def _cat(w: Writer, node: fx.Node) -> str:
    axis = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    return w.b.add("Concat", *(w.value(p) for p in node.args[0]), axis=axis)  # type: ignore[union-attr]


@_handles("aten.repeat")
def _repeat(w: Writer, node: fx.Node) -> str:
    x, counts = node.args
    value = w.value(x)
    missing = len(counts) - type_of(x).rank  # type: ignore[arg-type]
    if missing:
        value = w.b.add("Unsqueeze", value, w.b.ints(*range(missing)))
    return w.b.add("Tile", value, w.b.ints(*(int(c) for c in counts)))  # type: ignore[union-attr]


@_handles("embedding")
def _embedding(w: Writer, node: fx.Node) -> str:
    index, table = node.args
    return w.rows_of(table, w.value(index))  # type: ignore[arg-type]


@_handles("select_rows")
def _select_rows(w: Writer, node: fx.Node) -> str:
    return w.b.add("Gather", *map(w.value, node.args), axis=0)


@_handles("linear")
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


@_handles("expert_linear")
def _expert_linear(w: Writer, node: fx.Node) -> str:
    """A Loop over the experts, each of which gathers its tokens, and adds nothing where it has none."""
    x, weight, bias, index = node.args
    experts, n, _ = type_of(weight).shape  # type: ignore[arg-type]
    b = w.b
    if index is None:  # all tokens have a row for each
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


@_handles("bmm")
def _bmm(w: Writer, node: fx.Node) -> str:
    return w.b.add("MatMul", *map(w.value, node.args))


def _ones(w: Writer, width: int) -> str:
    def made() -> str:
        return w.b.store(w.b.unique(f"constant/ones[{width}]"), torch.ones(width))

    return w.b.once(("ones", width), made)


@_handles("rms_norm")
def _rms_norm(w: Writer, node: fx.Node) -> str:
    x, weight, eps = node.args
    return _rms(w, w.value(x), weight, eps, type_of(x).shape[-1])  # type: ignore[arg-type]


@_handles("add_rms_norm")
def _add_rms_norm(w: Writer, node: fx.Node) -> list[str]:
    x, residual, weight, eps = node.args
    total = w.b.add("Add", w.value(x), w.value(residual))
    return [_rms(w, total, weight, eps, type_of(x).shape[-1]), total]  # type: ignore[arg-type]


def _rms(w: Writer, x: str, weight: Any, eps: Any, width: int) -> str:
    scale = _ones(w, width) if weight is None else w.value(weight)
    return w.b.add("RMSNormalization", x, scale, axis=-1, epsilon=float(eps))


@_handles("layer_norm")
def _layer_norm(w: Writer, node: fx.Node) -> str:
    x, weight, bias, eps = node.args
    return _layer(w, w.value(x), weight, bias, eps, type_of(x).shape[-1])  # type: ignore[arg-type]


@_handles("add_layer_norm")
def _add_layer_norm(w: Writer, node: fx.Node) -> list[str]:
    x, residual, weight, bias, eps = node.args
    total = w.b.add("Add", w.value(x), w.value(residual))
    return [_layer(w, total, weight, bias, eps, type_of(x).shape[-1]), total]  # type: ignore[arg-type]


def _layer(w: Writer, x: str, weight: Any, bias: Any, eps: Any, width: int) -> str:
    scale = _ones(w, width) if weight is None else w.value(weight)
    return w.b.add("LayerNormalization", x, scale, w.value(bias), axis=-1, epsilon=float(eps))


_REDUCTIONS = {"sum": "ReduceSum", "mean": "ReduceMean", "amax": "ReduceMax", "amin": "ReduceMin", "prod": "ReduceProd"}


@_handles("reduce")
def _reduce(w: Writer, node: fx.Node) -> str:
    x, kind, dim = node.args
    if kind == "argmax":
        return w.b.add("ArgMax", w.value(x), axis=dim, keepdims=0)
    found = w.b.add(_REDUCTIONS[str(kind)], w.value(x), w.b.ints(int(dim)), keepdims=0)  # type: ignore[arg-type]
    return found


@_handles("softmax")
def _softmax(w: Writer, node: fx.Node) -> str:
    return w.b.add("Softmax", w.value(node.args[0]), axis=-1)


@_handles("topk")
def _topk(w: Writer, node: fx.Node) -> list[str]:
    x, k, largest = node.args
    return w.b.add("TopK", w.value(x), w.b.ints(int(k)), outputs=2, axis=-1, largest=int(bool(largest)), sorted=1)  # type: ignore[arg-type]


@_handles("gather")
def _gather(w: Writer, node: fx.Node) -> str:
    x, index = node.args
    return w.b.add("GatherElements", w.value(x), w.b.cast(w.value(index), torch.int64), axis=-1)


@_handles("columns")
def _columns(w: Writer, node: fx.Node) -> str:
    x, order = node.args
    return w.b.add("Gather", w.value(x), w.b.cast(w.value(order), torch.int64), axis=-1)


@_handles("scatter")
def _scatter(w: Writer, node: fx.Node) -> str:
    x, index, src, value, accumulate = node.args
    b, places = w.b, w.b.cast(w.value(index), torch.int64)
    if src is None:
        dtype = type_of(x).dtype  # type: ignore[arg-type]
        fill = b.constant(float(value) if dtype.is_floating_point else int(value), dtype)  # type: ignore[arg-type]
        source = b.add("Expand", fill, b.add("Shape", places))
    else:
        source = w.value(src)
    return b.add("ScatterElements", w.value(x), places, source, axis=-1, reduction="add" if accumulate else "none")


@_handles("cumsum")
def _cumsum(w: Writer, node: fx.Node) -> str:
    rank = type_of(node).rank
    return w.b.add("CumSum", w.value(node.args[0]), w.b.constant(rank - 1, torch.int64))


@_handles("rope")
def _rope(w: Writer, node: fx.Node) -> str:
    x, cos, sin, style = node.args
    return _rotated(w, x, w.value(cos), w.value(sin), type_of(cos).shape[-1], style)  # type: ignore[arg-type]


def _rotated(w: Writer, x: Any, cos: str, sin: str, width: int, style: Any) -> str:
    return rotate(w.b, w.value(x), cos, sin, width, type_of(x).shape[-1], str(style))


@_handles("attention")
def _attention(w: Writer, node: fx.Node) -> str:
    q, k, v, sinks, alibi, _, scale, window, chunk, softcap, *rest = node.args
    ahead, bias = [*rest, *(0, None)[len(rest) :]]
    return _attended(
        w, (q, k, v), (w.value(q), w.value(k)), (sinks, alibi, bias), (scale, window, chunk, softcap, ahead)
    )


@_handles("paged_attention")
def _paged_attention(w: Writer, node: fx.Node) -> str:
    q, k, v, positions, q_cos, q_sin, k_cos, k_sin, sinks, alibi, _, scale, window, chunk, softcap, style = node.args[
        :16
    ]
    ahead, bias = [*node.args[16:], *(0, None)[len(node.args) - 16 :]]
    at = w.value(positions)

    def turned(x: Any, cos: Any, sin: Any) -> str:
        if cos is None or sin is None:
            return w.value(x)

        def row(table: Any) -> str:  # layers share the tables
            return w.b.once(("row", table.target), lambda: w.rows_of(table, at), "positions")

        return _rotated(w, x, row(cos), row(sin), type_of(cos).shape[-1], style)

    options = scale, window, chunk, softcap, ahead
    return _attended(w, (q, k, v), (turned(q, q_cos, q_sin), turned(k, k_cos, k_sin)), (sinks, alibi, bias), options)


def _attended(w: Writer, operands: Any, turned: tuple[str, str], extras: Any, options: Any) -> str:
    q, k, v = (type_of(x).shape for x in operands)
    scale, window, chunk, softcap, ahead = options
    heads = Heads(q[0], k[0], q[1], v[1], float(scale), int(window), int(chunk), float(softcap), int(ahead))
    sinks, alibi, bias = map(w.value, extras)
    centre = type_of(extras[2]).shape[1] // 2 if bias else 0
    return attention(w.b, w.sequences, *turned, w.value(operands[2]), Extras(sinks, alibi, bias, centre), heads)


@_handles("causal_conv")
def _causal_conv(w: Writer, node: fx.Node) -> str:
    """Conv with a group per channel, over each sequence of the batch."""
    x, weight, bias, _ = node.args
    taps, channels = type_of(weight).shape  # type: ignore[arg-type]
    b = w.b
    rows = b.add("Transpose", split(b, w.sequences, w.value(x), channels), perm=[0, 2, 1])
    kernel = b.add("Unsqueeze", b.add("Transpose", w.value(weight), perm=[1, 0]), b.ints(1))
    done = b.add("Conv", rows, kernel, w.value(bias), group=channels, kernel_shape=[taps], pads=[taps - 1, 0])
    return b.reshape(b.add("Transpose", done, perm=[0, 2, 1]), -1, channels)
