"""The state of a lowering and its helpers: places of values, new buffers, weights in a kernel's format, steps."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx

from ...runtime.format.kv import KVLayer
from ...runtime.format.operands import Operand, WeightOperand
from ...runtime.format.program import LOGITS
from ..errors import UnsupportedModel
from ..eviction import Eviction
from ..graph.graph import Graph
from ..graph.tensor_types import LOGIT_ROWS, TOKENS, TensorType, type_of
from ..ops import OPS, op_of
from ..ops.body import Body
from ..weights.formats.base import StorageFormat
from .builder import Cached, ProgramBuilder, WeightSource
from .layout import Layout, Role, Stored
from .placed import Placed, contiguous
from .profile import Profile
from .steps.base import QuantizedRows, Rows, Step
from .steps.linear import QuantizeRows
from .steps.pointwise import Pointwise
from .storage import narrow_values

aten = torch.ops.aten
LINEAR, EXPERTS = OPS["linear"].overload, OPS["expert_linear"].overload
POINT = OPS["pointwise"].overload
ALL_GATHER = OPS["all_gather"].overload
_COPY = Body.parse("t0 = copy a0")
WITHIN_STEP = -1  # the window of a KV layer that is written and read only within one step


@dataclass(frozen=True)
class LowerOptions:
    """The facts of the deployment and the back end that a program depends on. max_seq_len: 0 if it is not known.
    state_dtype: "bf16" if recurrent states that are matrices, or vectors per channel, are stored in it; other states
    stay float32. kv_dtypes: cache types that differ from kv_dtype, by the layer's number in the graph."""

    kv_dtype: str
    profile: Profile
    block_size: int = 32
    max_seq_len: int = 0
    state_dtype: str = "f32"
    kv_dtypes: Mapping[int, str] = field(default_factory=dict[int, str])

    def kv_of(self, layer: int) -> str:
        """The type of a layer's cache, by the layer's number in the graph."""
        return self.kv_dtypes.get(layer, self.kv_dtype)


@dataclass(frozen=True)
class Matrix:
    """A weight in the form that a kernel reads."""

    operand: WeightOperand
    layout: Layout
    stored: Stored


class Lowerer:
    """The state of one lowering: places of values, buffers, weights and steps. lower.py drives it."""

    def __init__(self, graph: Graph, options: LowerOptions, beside: Lowerer | None = None) -> None:
        """beside: the lowering of another graph with the same layers, to whose program these steps are added; None: a
        new program."""
        self.graph = graph
        self.options = options
        self.builder = ProgramBuilder() if beside is None else beside.builder
        self.values: dict[fx.Node, Any] = {}
        self.current: fx.Node = graph.output
        self._kv_layers: dict[int | KVLayer, int] = {} if beside is None else beside._kv_layers
        self._written: set[int] = set()
        self._quantized: dict[tuple[Operand, int, int, bool], QuantizedRows] = {}
        self._in_output = _written_to_output(graph, graph.output)
        for outputs in graph.sections.values():
            if LOGITS in outputs:
                self._in_output |= _written_to_output(graph, outputs[LOGITS])
        self._narrow = narrow_values(graph)
        self._multiplied = self._shared_with_linear()
        self._gathered_logits = set[fx.Node]()  # values that ranks gather to the logits
        self._screened = self._screened_heads()
        if beside is not None:
            self._screened |= beside._screened

    @contextmanager
    def section(self, name: str) -> Generator[None]:
        """Lower steps within this context as a section: it may read results of the step, but none of another section,
        which may not have run. A section that is lowered within another's context runs after a step of that section."""
        builder, values, quantized = self.builder, dict(self.values), dict(self._quantized)
        outer, builder.section = builder.section, name
        builder.given[name], builder.gives[name] = {}, {}
        yield
        builder.section, self.values, self._quantized = outer, values, quantized

    def placed(self, node: Any) -> Placed:
        """The place of a node's value; weights are registered as plain arrays."""
        return self.constant(node) if node.op == "get_attr" else self.values[node]

    def op_name(self, node: fx.Node) -> str:
        """Name of a dialect op."""
        op = op_of(node.target)
        assert op is not None, f"{node.target} is not declared"
        return op.name

    def new(self, node: fx.Node, index: int | None = None) -> Placed:
        """The buffer for a node's result, or the logits output. index: the number of the result if the node has
        several, else None."""
        found = node.meta["type"]
        kind: TensorType = found if index is None else found[index]
        if node in self._in_output:
            size = self.graph.output.meta["type"].shape[-1]
            return Placed("output", LOGITS, 0, kind.shape, contiguous(kind.shape), size, "f32", LOGIT_ROWS)
        assert kind.rows is not None
        rows = TOKENS if kind.rows == TOKENS else LOGIT_ROWS  # draft rows are a section's logit rows
        return self.builder.buffer(kind.shape, self._storage(node, index or 0, kind.dtype), rows)

    def _storage(self, node: fx.Node, index: int, dtype: torch.dtype) -> str:
        """Element type of an activation: integers and booleans are i32."""
        if not dtype.is_floating_point:
            return "i32"
        return self.options.profile.activation if (node, index) in self._narrow else "f32"

    def emit(self, step: Step, node: fx.Node) -> None:
        """Append a step for `node`."""
        self.builder.append(step, node.meta.get("module", ""))

    def elementwise(self, body: Body, inputs: list[Placed], out: Placed, node: fx.Node) -> None:
        """A pointwise step over views that broadcast to `out`."""
        step = Pointwise(
            rows=row_kind(out), args=tuple(v.operand for v in inputs), y=out.operand, body=body, shape=out.shape,
            walks=(*(value.strides_over(out.shape) for value in inputs), out.strides),
        )  # fmt: skip
        self.emit(step, node)

    def copy(self, source: Placed, target: Placed, node: fx.Node) -> None:
        """Copy between views of one shape."""
        self.elementwise(_COPY, [source], target, node)

    def dense(self, value: Placed) -> Placed:
        """`value` with contiguous elements in its rows: copied if they are not, or if it is an input that is not
        float32. UnsupportedModel for a constant whose elements are not contiguous."""
        if value.is_dense and (value.space != "input" or value.dtype == "f32"):
            return replace(value, strides=contiguous(value.shape))
        if not value.rows:
            raise UnsupportedModel("a constant is needed in another order", "this is a gap in icc; please report it")
        dtype = "f32" if value.space == "input" and "f" in value.dtype else value.dtype
        out = self.builder.buffer(value.shape, dtype, value.rows)
        shown = value if value.shape else replace(value, shape=(1,), strides=(1,))
        target = out if out.shape else replace(out, shape=(1,), strides=(1,))
        self.copy(shown, target, self.current)
        return out

    def quantized_rows(self, x: Placed, k: int, form: StorageFormat) -> QuantizedRows:
        """int8 codes, scales and sums of an activation; made once and shared by all products that read it."""
        group, unsigned = form.row_group, form.unsigned_rows
        key = (x.operand, k, group, unsigned)
        if key not in self._quantized:
            codes = self.builder.buffer((k,), "i8", x.rows)
            scales, sums = (self.builder.buffer((k // group,), "f32", x.rows) for _ in range(2))
            found = QuantizedRows(codes.operand, scales.operand, sums.operand)
            step = QuantizeRows(
                rows=row_kind(x), x=x.operand, codes=found.codes, scales=found.scales, sums=found.sums,
                k=k, group=group, unsigned=unsigned,
            )  # fmt: skip
            self.emit(step, self.current)
            self._quantized[key] = found
        return self._quantized[key]

    def product_rows(self, x: Placed, k: int, weight: Matrix) -> Operand | QuantizedRows:
        """The rows `x` in the form that the kernel of a product with `weight` reads."""
        return self.quantized_rows(x, k, weight.layout.format) if weight.layout.int8_rows else x.operand

    def kv_layer(self, layer: int) -> int:
        """The program's number of a graph's attention layer; numbers have no gaps if passes removed a layer."""
        return self._kv_layers.setdefault(layer, len(self._kv_layers))

    @property
    def kv_layers(self) -> dict[int, int]:
        """The numbers of attention layers in the program, by their numbers in the graph."""
        return {layer: number for layer, number in self._kv_layers.items() if isinstance(layer, int)}

    def first_of(self, layer: int) -> bool:
        """Whether a KV layer occurs for the first time; later calls give False."""
        known = layer in self._written
        self._written.add(layer)
        return not known

    def scratch_layer(self, shape: KVLayer) -> int:
        """The number of the KV layer for attention that caches nothing: one for all layers of the same shape."""
        return self._kv_layers.setdefault(shape, len(self._kv_layers))

    def cache(self, layer: int, shape: KVLayer, dtype: str, window: int, policy: Eviction | None = None) -> None:
        """Record what a KV layer stores of a token, and how much of it is read, see Cached; several layers may read one
        cache."""
        before = self.builder.kv_layers.get(layer, Cached(shape, dtype, window, policy))
        longest = max(window, before.window) if window and before.window else 0
        self.builder.kv_layers[layer] = Cached(shape, dtype, longest, policy or before.policy)

    # weights

    def vector(self, node: Any) -> WeightOperand | None:
        """A bias or scale as a plain float32 array; None if `node` is None."""
        return None if node is None else self.plain(node)

    def plain(self, node: Any) -> WeightOperand:
        """A weight as a plain float32 (or int32) array."""
        return self._stored(node, "plain").operand

    def constant(self, node: Any) -> Placed:
        """A weight as an operand of elementwise kernels."""
        weight = self.graph.weight(node)
        stored = self._stored(node, "plain")
        strides = contiguous(weight.shape)
        return Placed("weight", stored.operand.name, 0, weight.shape, strides, 0, stored.layout.name, "")

    def matrix(self, node: Any) -> Matrix:
        """A weight in the form that a linear kernel reads."""
        return self._stored(node, "screen" if id(self.graph.weight(node)) in self._screened else "product")

    def table(self, node: Any) -> Matrix:
        """An embedding table, shared with the linear layer that it is tied to, if there is one. UnsupportedModel for a
        table of integers."""
        weight = self.graph.weight(node)
        if not weight.dtype.is_floating_point:
            raise UnsupportedModel("a table of integers is not supported")
        return self.matrix(node) if id(weight) in self._multiplied else self._stored(node, "table")

    def _stored(self, node: fx.Node, role: Role) -> Matrix:
        weight = self.graph.weight(node)
        layout = self.options.profile.layout(weight.storage, role)
        name = self._tied_name(node) if role in ("product", "screen") else str(node.target)
        operand = self.builder.weight(name, WeightSource(weight, layout, weight.shape))
        return Matrix(operand, layout, Stored(layout.format.name, role))

    def _shared_with_linear(self) -> set[int]:
        """Identities of weights that a linear layer reads (tied embeddings)."""
        found = (n.args[1] for n in self.graph.nodes if n.target is LINEAR)
        return {id(self.graph.weight(w)) for w in found if w.op == "get_attr"}  # type: ignore[union-attr, arg-type]

    def _screened_heads(self) -> set[int]:
        """Identities of the weights whose product is the logits, with no op after it, if screening pays off."""
        profile, found = self.options.profile, set[int]()
        sections = [outputs[LOGITS] for outputs in self.graph.sections.values() if LOGITS in outputs]
        for output in (self.graph.output, *sections):
            head = _behind_views(output)
            if head.target is ALL_GATHER and head in self._in_output:
                head = _behind_views(head.args[0])
                if len(head.users) == 1:
                    self._gathered_logits.add(head)
            if head.target is not LINEAR or not self.gives_logits(head):
                continue
            weight = self.graph.weight(head.args[1])
            if prod(weight.shape) >= profile.screened_bytes and profile.layout(weight.storage, "screen").screens:
                found.add(id(weight))
        return found

    def gives_logits(self, node: fx.Node) -> bool:
        """Whether a node's result is the logits, or this rank's part of them, and nothing else reads it."""
        return node in self._in_output or node in self._gathered_logits

    def _tied_name(self, node: fx.Node) -> str:
        """One name for all graph names of one handle."""
        weight = self.graph.weight(node)
        return next(name for name, other in self.graph.weights.items() if other is weight)


def row_kind(value: Placed) -> Rows:
    """The kind of a value's rows; the value must not be a constant."""
    assert value.rows
    return "tokens" if value.rows == TOKENS else "logit_rows"


def _behind_views(node: Any) -> Any:
    """The node behind a chain of views that has no other readers."""
    while node.target is aten.view.default and len(node.users) == 1:
        node = node.args[0]
    return node


def _written_to_output(graph: Graph, output: fx.Node) -> set[fx.Node]:
    """Nodes that write straight into the logits: the last kernel, and elementwise kernels' sources in place."""
    node: Any = output  # fx types its arguments too widely to follow them
    found: set[fx.Node] = set()
    while True:
        node = _behind_views(node)
        if node.target not in (LINEAR, POINT, ALL_GATHER) or len(node.users) != 1:
            return found
        found.add(node)
        if node.target is not POINT:
            return found
        size = type_of(graph.output).shape[-1]
        alike = [n for n in node.args[0] if n.op == "call_function" and type_of(n).shape[-1:] == (size,)]  # type: ignore[union-attr]
        if len(alike) == 2 and _behind_views(alike[0]).target is EXPERTS:  # it adds to its output
            alike.pop(0)
        if len(alike) != 1:
            return found
        node = alike[0]
