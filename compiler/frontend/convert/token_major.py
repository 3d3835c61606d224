"""From an exported program to the IR: every value becomes token-major.

The export has logical shapes such as [1, T, H] or [1, heads, T, D]. Here each value is followed together with the place
of its token axis, and the emitted graph keeps that axis first: [T, 1, H], [T, 1, heads, D]. Ops that only move the
token axis disappear; ops that would mix tokens, other than attention, are refused by name. This is what lets one graph
serve a packed batch of many sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ...errors import UnsupportedModel
from ...graph.graph import TOKENS, Graph, ModelInfo, TensorType, type_of
from ...weights.handles import Constant, Weight
from ..export.trace import module_path
from ..layers.kinds import LayerKinds
from .static_values import StaticValues


class _TokenAxis:
    def __repr__(self) -> str:
        return "T"


T = _TokenAxis()
Dims = tuple[Any, ...]


@dataclass(frozen=True)
class Value:
    """A canonical node and the logical dims that the export gave it; T marks the token axis.

    If `dims` holds T but the node has no row axis, every token has the same value.
    """

    node: fx.Node
    dims: Dims

    @property
    def axis(self) -> int | None:
        """Logical index of the token axis."""
        return self.dims.index(T) if T in self.dims else None

    @property
    def per_token(self) -> bool:
        """Whether the canonical node has a row axis."""
        return type_of(self.node).rows is not None

    @property
    def features(self) -> tuple[int, ...]:
        """Logical dims without the token axis: the canonical per-row shape."""
        return tuple(d for d in self.dims if d is not T)

    def canonical(self, logical_axis: int) -> int:
        """Index in the canonical tensor of a logical axis other than the token axis."""
        logical_axis %= len(self.dims)
        before = sum(1 for d in self.dims[:logical_axis] if d is not T)
        return before + (1 if self.per_token else 0)


def dims_of(val: Any) -> Dims:
    """Logical dims of an exported value; raises ValueError where a size mixes tokens with something else."""
    dims: list[Any] = []
    for size in val.shape:
        if isinstance(size, torch.SymInt):
            expr = size.node.expr
            if expr.is_Symbol:
                dims.append(T)
            elif expr.is_Integer:
                dims.append(int(expr))
            else:
                raise ValueError(f"a tensor of size {expr}")
        else:
            dims.append(int(size))
    if dims.count(T) > 1:
        raise ValueError("a tensor over pairs of tokens")
    return tuple(dims)


Handler = Callable[["Lowering", fx.Node, list[Any], dict[str, Any]], Any]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a function for exported ops, by name without overload: "aten.view"."""

    def register(fn: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, fn))
        return fn

    return register


# asked before the handlers: patterns over several ops, which return None for a node that is not theirs
Pattern = Callable[["Lowering", fx.Node], Any]
PATTERNS: list[Pattern] = []


def pattern(fn: Pattern) -> Pattern:
    """Register a pattern."""
    PATTERNS.append(fn)
    return fn


def op_name(target: Any) -> str:
    """aten.view for aten::view.default; plain functions go by their own name."""
    if not hasattr(target, "_schema"):
        return str(getattr(target, "__name__", target))
    return str(target._schema.name).replace("::", ".")


class Unrepresentable:
    """Marks a value that has no token-major form; only an error if something kept uses it."""

    def __init__(self, reason: str, node: fx.Node) -> None:
        self.reason = reason
        self.node = node


class Lowering:
    """State of one conversion: the graph being built and the values seen so far.

    `kinds` knows the layers that the program only names, `regions` is what replay.py needs to put them in.
    """

    def __init__(
        self,
        program: ExportedProgram,
        weights: dict[str, Weight],
        info: ModelInfo,
        max_tokens: int,
        kinds: LayerKinds | None = None,
    ) -> None:
        self.program = program
        self.source_weights = weights
        self.max_tokens = max_tokens
        self.kinds = kinds
        self.regions: dict[int, Any] = {}
        self.stored: dict[str, Value] = {}
        self.static = StaticValues(program, weights)
        self.analysed_masks: dict[Any, Any] = {}
        self._layers = 0
        self.graph = Graph(fx.Graph(), {}, info)
        self.env: dict[fx.Node, Any] = {}
        self.current: fx.Node | None = None

    def run(self) -> Graph:
        """Convert every node; returns the graph whose output is logits [T, vocab]."""
        self._inputs()
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self.env[node] = self._call(node)
            elif node.op == "output":
                self._output(node.args[0][0])
        self.graph.sweep()
        return self.graph

    def emit(self, target: Any, *args: Any) -> fx.Node:
        """A call in the new graph; nodes among args are canonical."""
        node = self.graph.call(target, *args)
        if self.current is not None:
            node.meta["module"] = module_path(self.current)
        return node

    def constant(self, name: str, value: torch.Tensor) -> Value:
        """A new constant of the graph."""
        return Value(self.graph.add_weight(name, Constant(value)), tuple(value.shape))

    def view(self, value: Value, dims: Dims) -> Value:
        """The same elements under other logical dims; the canonical order must not change."""
        shape = tuple(d for d in dims if d is not T)
        if shape == value.features:
            return Value(value.node, dims)
        lead = (-1,) if value.per_token else ()
        return Value(self.emit(torch.ops.aten.view.default, value.node, [*lead, *shape]), dims)

    def next_layer(self) -> int:
        """The number of a new attention layer, each of which owns one KV cache."""
        self._layers += 1
        return self._layers - 1

    def refuse(self, node: fx.Node, reason: str) -> Unrepresentable:
        """The value of a node that cannot be converted."""
        return Unrepresentable(reason, node)

    def _inputs(self) -> None:
        graph = self.graph.fx
        specs = {s.arg.name: s for s in self.program.graph_signature.input_specs}
        used: dict[str, fx.Node] = {}
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            spec = specs[node.name]
            if spec.kind == InputKind.USER_INPUT:
                new = graph.placeholder("positions" if self.graph.input("token_ids") else "token_ids")
                new.meta["type"] = TensorType(TOKENS, (), torch.int64)
                self.env[node] = self.view(Value(new, (T,)), (1, T))
            elif node.users and spec.kind == InputKind.CONSTANT_TENSOR:
                self.env[node] = self._lifted(node, str(spec.target))
            elif node.users:
                used[str(spec.target).removeprefix("model.")] = node
        for name in self._weight_names(used):
            weight = self.source_weights[name]
            self.stored[name] = Value(self.graph.add_weight(name, weight), weight.shape)
            if name in used:
                self.env[used[name]] = self.stored[name]
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        for node in reversed(placeholders):  # fx wants them before everything else
            next(iter(graph.nodes)).prepend(node)

    def _weight_names(self, used: dict[str, fx.Node]) -> list[str]:
        """The weights of the program and of the layers that it only names, in an order that is always the same."""
        repeats = self.kinds.repeats if self.kinds is not None else []
        names = {*used, *(new for r in repeats for old, new in r.renames.items() if old in used)}
        place = {name: i for i, name in enumerate(self.source_weights)}
        return sorted(names, key=place.__getitem__)

    def _lifted(self, node: fx.Node, name: str) -> Value | Unrepresentable:
        value = self.program.constants[name]
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            return self.refuse(node, "a constant without a value")
        return self.constant(name.removeprefix("model."), value)

    def _call(self, node: fx.Node) -> Any:
        self.current = node
        for follow in PATTERNS:
            try:
                found = follow(self, node)
            except ValueError as error:
                return self.refuse(node, str(error))
            if found is not None:
                return found
        args = [self._arg(a) for a in node.args]
        kwargs = {k: self._arg(v) for k, v in node.kwargs.items()}
        bad = _first_unrepresentable([*args, *kwargs.values()])
        if bad is not None:
            return bad
        handler = HANDLERS.get(op_name(node.target))
        if handler is None and isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymBool)):
            return node.meta["val"]  # arithmetic on sizes
        if handler is None:
            return self.refuse(node, "the op is not in the dialect")
        try:
            return handler(self, node, args, kwargs)
        except ValueError as error:
            return self.refuse(node, str(error))
        except (RuntimeError, TypeError, IndexError, AttributeError, AssertionError) as error:
            # a form that the handler did not expect is refused like any other, unless nothing uses the value
            reason = " ".join(str(error).split())[:200]
            return self.refuse(node, f"an unexpected form ({type(error).__name__}: {reason})")

    def _arg(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            found = self.env.get(arg)
            return arg.meta.get("val") if found is None else found
        if isinstance(arg, (list, tuple)):
            return [self._arg(a) for a in arg]
        return arg

    def _output(self, node: fx.Node) -> None:
        value = self.env[node]
        if isinstance(value, Unrepresentable):
            module = module_path(value.node)
            op = op_name(value.node.target)
            raise UnsupportedModel(
                f"{op} in module {module or 'model'!r} cannot be compiled: {value.reason}",
                "only ops that work per token, and attention, are supported",
                op=op,
                module=module,
            )
        if not value.per_token:
            raise UnsupportedModel("the logits do not depend on the tokens")
        vocab = value.features[-1]
        self.graph.returns(logits=self.view(value, (T, vocab)).node)


def _first_unrepresentable(values: list[Any]) -> Unrepresentable | None:
    for value in values:
        if isinstance(value, Unrepresentable):
            return value
        if isinstance(value, list):
            found = _first_unrepresentable(value)
            if found is not None:
                return found
    return None
