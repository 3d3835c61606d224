"""What the lowering functions share: a value's place, new buffers, weights in the format that a kernel reads, steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from ...runtime.format.kv import KVLayer
from ...runtime.format.program import Operand
from ..errors import UnsupportedModel
from ..graph.graph import LOGIT_ROWS, TOKENS, Graph, TensorType, type_of
from ..ops import OPS, op_of
from ..weights.handles import QuantizedWeight, RowConcat, Weight, short_dtype
from .builder import ProgramBuilder, Record, WeightSource
from .placed import Placed, contiguous
from .profile import Profile
from .storage import narrow_values

aten = torch.ops.aten
LINEAR = OPS["linear"].overload
POINT = OPS["pointwise"].overload


@dataclass(frozen=True)
class LowerOptions:
    """What the program must know of the deployment and the backend. max_seq_len: 0 if it is not known."""

    kv_dtype: str
    profile: Profile
    block_size: int = 32
    max_seq_len: int = 0


@dataclass(frozen=True)
class Matrix:
    """A weight as a linear kernel takes it; bits is 0 and format the element type for dense ones."""

    operand: Operand
    format: str
    bits: int = 0
    group: int = 0


class Lowerer:
    """State of one lowering: where values lie, which buffers, weights and steps there are. lower.py drives it."""

    def __init__(self, graph: Graph, options: LowerOptions) -> None:
        self.graph = graph
        self.options = options
        self.builder = ProgramBuilder()
        self.values: dict[fx.Node, Any] = {}
        self.ends: dict[fx.Node, int] = {}  # how many records there were once a node was lowered
        self.current: fx.Node = graph.output
        self._kv_layers: dict[int, int] = {}
        self._quantized: dict[tuple[str, int, int], list[Operand]] = {}
        self._in_output = _written_to_output(graph, graph.output)
        if graph.exit is not None:
            self._in_output |= _written_to_output(graph, graph.exit)
        self._narrow = narrow_values(graph)
        self._tiled = self._shared_with_linear()
        self._screened = self._screened_heads()

    def placed(self, node: Any) -> Placed:
        """Where a node's value lies; weights are registered as plain arrays."""
        return self.constant(node) if node.op == "get_attr" else self.values[node]

    def op_name(self, node: fx.Node) -> str:
        """Name of a dialect op."""
        op = op_of(node.target)
        assert op is not None, f"{node.target} is not declared"
        return op.name

    def new(self, node: fx.Node, index: int | None = None) -> Placed:
        """The buffer for a node's result, or the logits output."""
        found = node.meta["type"]
        kind: TensorType = found if index is None else found[index]
        if node in self._in_output:
            size = self.graph.output.meta["type"].shape[-1]
            return Placed("output", "", 0, kind.shape, contiguous(kind.shape), size, "f32", LOGIT_ROWS)
        assert kind.rows is not None
        rows = TOKENS if kind.rows == TOKENS else LOGIT_ROWS  # draft rows are the logit rows of a section
        return self.builder.buffer(kind.shape, self._storage(node, index or 0, kind.dtype), rows)

    def _storage(self, node: fx.Node, index: int, dtype: torch.dtype) -> str:
        """Element type of an activation: integers and booleans are i32."""
        if not dtype.is_floating_point:
            return "i32"
        return self.options.profile.activation if (node, index) in self._narrow else "f32"

    def step(
        self,
        op: str,
        params: dict[str, Any],
        inputs: list[Operand],
        outputs: list[Placed],
        node: fx.Node,
        layer: int = -1,
        rows: str = "",
    ) -> None:
        """Append a launch for `node`; its row count is that of its output."""
        kind = rows or (outputs[0].rows if outputs else TOKENS)
        full = {**params, "rows": kind}
        targets = [o.operand for o in outputs]
        self.builder.records.append(Record(op, full, inputs, targets, layer, node.meta.get("module", "")))

    def elementwise(self, body: str, inputs: list[Placed], out: Placed, node: fx.Node) -> None:
        """A pointwise launch over views that broadcast to `out`."""
        described = []
        for value in inputs:
            wide = value.expand(out.shape)
            strides = ",".join(str(0 if n == 1 else s) for n, s in zip(out.shape, wide.strides, strict=True))
            described.append(f"{value.dtype}:{value.row_stride if value.rows else 0}:{strides}")
        register = body.split("; ")[-1].split(" = ")[0]
        strides = ",".join(map(str, out.strides))
        params = {
            "shape": list(out.shape),
            "inputs": described,
            "body": body.split("; "),
            "outputs": [f"{register}:{out.dtype}:{out.row_stride}:{strides}"],
        }
        self.step("pointwise", params, [v.operand for v in inputs], [out], node)

    def copy(self, source: Placed, target: Placed, node: fx.Node) -> None:
        """Copy between views of one shape."""
        self.elementwise("t0 = copy a0", [source], target, node)

    def dense(self, value: Placed) -> Placed:
        """`value` with its rows' elements contiguous, copied if they are not."""
        if value.is_dense and (value.space != "input"):
            return replace(value, strides=contiguous(value.shape))
        if not value.rows:
            raise UnsupportedModel("a constant is needed in another order", "this is a gap in icc; please report it")
        out = self.builder.buffer(value.shape, value.dtype, value.rows)
        shown = value if value.shape else replace(value, shape=(1,), strides=(1,))
        target = out if out.shape else replace(out, shape=(1,), strides=(1,))
        self.copy(shown, target, self.current)
        return out

    def quantized_rows(self, x: Placed, k: int, group: int) -> list[Operand]:
        """int8 codes, scales and sums of an activation; made once and shared by all products that read it."""
        key = (f"{x.space}:{x.name}:{x.offset}", k, group)
        if key not in self._quantized:
            codes = self.builder.buffer((k,), "i8", x.rows)
            scales, sums = (self.builder.buffer((k // group,), "f32", x.rows) for _ in range(2))
            params = {"k": k, "group": group, "x_stride": x.row_stride}
            self.step("quantize_rows", params, [x.operand], [codes, scales, sums], self.current)
            self._quantized[key] = [codes.operand, scales.operand, sums.operand]
        return self._quantized[key]

    def product(self, x: Placed, k: int, weight: Matrix) -> tuple[str, dict[str, Any], list[Operand]]:
        """The op of a product of `x` with a weight, what it must know of both, and the operands that hold `x`."""
        if not weight.bits:
            return "linear", {"format": weight.format, "x_stride": x.row_stride}, [x.operand]
        facts = {"bits": weight.bits, "group": weight.group}
        if weight.format == self.options.profile.screened:
            facts["split"] = True
        if self.options.profile.int8_activations:
            return "linear_q", facts, self.quantized_rows(x, k, weight.group)
        return "linear_q", {**facts, "x_stride": x.row_stride}, [x.operand]

    def kv_layer(self, layer: int) -> int:
        """The number of a graph's attention layer in the program: without gaps where passes removed one."""
        return self._kv_layers.setdefault(layer, len(self._kv_layers))

    def cache(self, layer: int, shape: KVLayer, window: int) -> None:
        """What a KV layer holds of a token; `window` tokens are read of it, or all. Several may read it."""
        before = self.builder.kv_layers.get(layer, (shape, window))[1]
        self.builder.kv_layers[layer] = shape, max(window, before) if window and before else 0

    # weights

    def vector(self, node: Any) -> Operand:
        """A bias or scale: float32, plain."""
        return self.plain(node)

    def plain(self, node: Any) -> Operand:
        """A weight as a plain float32 (or int32) array."""
        weight = self.graph.weight(node)
        fmt = "f32" if weight.dtype.is_floating_point else "i32"
        return self.builder.weight(str(node.target), WeightSource(weight, fmt, 0, weight.shape))

    def constant(self, node: Any) -> Placed:
        """A weight as an operand of elementwise kernels."""
        weight = self.graph.weight(node)
        dtype = "f32" if weight.dtype.is_floating_point else "i32"
        operand = self.plain(node)
        return Placed("weight", operand.name, 0, weight.shape, contiguous(weight.shape), 0, dtype, "")

    def matrix(self, node: Any) -> Matrix:
        """A weight as a linear kernel reads it: quantized, or tiled in its storage type."""
        weight = self.graph.weight(node)
        quantized = _quantization(weight)
        if quantized:
            bits, group = quantized
            packed = self.options.profile.quant.format(bits)
            if id(weight) in self._screened:
                packed = self.options.profile.screened
            source = WeightSource(weight, packed, group, weight.shape)
            return Matrix(self.builder.weight(str(node.target), source), packed, bits, group)
        item = _dense_format(weight)
        source = WeightSource(weight, self.options.profile.dense.format(item), 0, weight.shape)
        return Matrix(self.builder.weight(self._tied_name(node), source), item)

    def table(self, node: Any) -> tuple[Operand, dict[str, Any]]:
        """An embedding table: shared with the linear layer that it is tied to, if there is one, else plain."""
        weight = self.graph.weight(node)
        rows = weight.shape[0]
        if _quantization(weight) is not None:
            return self._quantized_table(node, rows)
        if id(weight) in self._tiled:
            matrix = self.matrix(node)
            return matrix.operand, {"table_rows": rows, "format": self.options.profile.dense.format(matrix.format)}
        if not weight.dtype.is_floating_point:
            raise UnsupportedModel("a table of integers is not supported")
        item = _dense_format(weight)
        source = WeightSource(weight, item, 0, weight.shape)
        return self.builder.weight(str(node.target), source), {"table_rows": rows, "format": item}

    def _quantized_table(self, node: Any, rows: int) -> tuple[Operand, dict[str, Any]]:
        profile, weight = self.options.profile, self.graph.weight(node)
        if profile.quantized_tables:
            matrix = self.matrix(node)
            return matrix.operand, {"table_rows": rows, "format": matrix.format, "group": matrix.group}
        source = WeightSource(weight, profile.activation, 0, weight.shape)
        return self.builder.weight(str(node.target), source), {"table_rows": rows, "format": profile.activation}

    def _shared_with_linear(self) -> set[int]:
        """Identities of dense weights that a linear layer reads (tied embeddings)."""
        found = (n.args[1] for n in self.graph.nodes if n.target is LINEAR)
        handles = (self.graph.weight(w) for w in found if w.op == "get_attr")  # type: ignore[union-attr]
        return {id(h) for h in handles if _quantization(h) is None}

    def _screened_heads(self) -> set[int]:
        """Identities of the 8-bit weights whose product is the logits, with nothing behind it, where that pays."""
        profile, found = self.options.profile, set[int]()
        for output in (self.graph.output, self.graph.exit):
            head = output if output is None else _behind_views(output)
            if not profile.screened or head is None or head.target is not LINEAR or head not in self._in_output:
                continue
            weight = self.graph.weight(head.args[1])
            large = prod(weight.shape) >= profile.screened_bytes
            if large and (_quantization(weight) or (0, 0))[0] == 8:
                found.add(id(weight))
        return found

    def _tied_name(self, node: fx.Node) -> str:
        """One name for all graph names of one handle."""
        weight = self.graph.weight(node)
        return next(name for name, other in self.graph.weights.items() if other is weight)


def _quantization(weight: Weight) -> tuple[int, int] | None:
    """(bits, group) of a quantized weight."""
    if isinstance(weight, RowConcat):
        return _quantization(weight.parts[0])
    return (weight.bits, weight.group) if isinstance(weight, QuantizedWeight) else None


def _dense_format(weight: Weight) -> str:
    name = short_dtype(weight.dtype)
    return name if name in ("f32", "bf16", "f16") else "f32"


def _behind_views(node: Any) -> Any:
    """What a node is a view of, if nothing else reads that."""
    while node.target is aten.view.default and len(node.users) == 1:
        node = node.args[0]
    return node


def _written_to_output(graph: Graph, output: fx.Node) -> set[fx.Node]:
    """Nodes that write straight into the logits: the last kernel, and elementwise kernels' sources in place."""
    node: Any = output  # fx types its arguments too widely to follow them
    found: set[fx.Node] = set()
    while True:
        node = _behind_views(node)
        if node.target not in (LINEAR, POINT) or len(node.users) != 1:
            return found
        found.add(node)
        if node.target is LINEAR:
            return found
        size = type_of(graph.output).shape[-1]
        alike = [n for n in node.args[0] if n.op == "call_function" and type_of(n).shape[-1:] == (size,)]  # type: ignore[union-attr]
        if len(alike) != 1:
            return found
        node = alike[0]
