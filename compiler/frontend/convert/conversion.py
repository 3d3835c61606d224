"""From an exported program to the IR: every value becomes token-major.

Ops that only move the token axis disappear; ops other than attention that would mix tokens are refused by name. One
graph can therefore serve a packed batch of many sequences. See `values.py` for the form of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ....runtime.format.batch import BatchArray
from ...errors import TensorError, UnsupportedModel
from ...graph.graph import Graph, ModelInfo
from ...graph.tensor_types import FIXED_INPUTS, type_of
from ...ops import OPS, traits_of
from ...weights.handles import Constant, Weight
from .static_values import StaticValues
from .table import DECLARED, Handlers
from .tail_axes import counts_from_the_end
from .values import (
    Dims,
    T,
    TracedValue,
    Unrepresentable,
    dims_of,
    first_unrepresentable,
    is_merged,
    module_path,
    op_name,
)


class CallFollower(Protocol):
    """A pattern over several ops. It sees every call of the exported program before the call's handler does."""

    def follow(self, conv: Conversion, node: fx.Node) -> Any:
        """The value that the node becomes, or None if it is not part of the pattern. ValueError with a reason refuses
        it."""
        ...


class Conversion:
    """One conversion: the graph being built and the values seen so far.

    followers: asked before `handlers`, in order. renames: for each layer that was not traced itself, its weights' names
    by those of the traced layer. declared: the program's inputs after token ids and positions. values: the result of
    each node of the program.
    """

    def __init__(
        self,
        program: ExportedProgram,
        weights: Mapping[str, Weight],
        info: ModelInfo,
        max_tokens: int,
        handlers: Handlers,
        followers: Sequence[CallFollower] = (),
        renames: Sequence[Mapping[str, str]] = (),
        declared: Sequence[BatchArray] = (),
    ) -> None:
        self.program = program
        self.weights = weights
        self.max_tokens = max_tokens
        self.static = StaticValues(program, weights, info.padding)
        self.graph = Graph(fx.Graph(), {}, info)
        self.values: dict[fx.Node, Any] = {}
        self._handlers = handlers
        self._followers = followers
        self._renames, self._declared = renames, declared
        self._stored: dict[str, TracedValue] = {}
        self._layers = 0
        self._current: fx.Node | None = None

    def run(self) -> Graph:
        """Convert every node, and return the graph, whose output is logits [T, vocab]. UnsupportedModel names the
        refused op and its module."""
        self._inputs()
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "output":
                self._output(node.args[0][0])
        self.graph.sweep()
        return self.graph

    def emit(self, target: Any, *args: Any) -> fx.Node:
        """Add a call to the graph; nodes among its operands are canonical."""
        node = self.graph.call(target, *args)
        if self._current is not None:
            node.meta["module"] = module_path(self._current)
        return node

    def constant(self, name: str, value: torch.Tensor) -> TracedValue:
        """Add a constant of any shape to the graph, and return it as a value without tokens."""
        return TracedValue(self.graph.add_weight(name, Constant(value)), tuple(value.shape))

    def stored(self, name: str) -> fx.Node | None:
        """The node of a weight of the checkpoint; None if the graph does not have it."""
        return self._stored[name].node if name in self._stored else None

    def is_lifted(self, name: str) -> bool:
        """Whether a weight of the graph is a constant that the model's code made."""
        return name in self.program.graph_signature.lifted_tensor_constants

    def view(self, value: TracedValue, dims: Dims) -> TracedValue:
        """The elements of a value under other logical dims, which may not change their canonical order."""
        shape = tuple(d for d in dims if d is not T)
        if shape == value.features:
            return TracedValue(value.node, dims)
        lead = (-1,) if value.per_token else ()
        return TracedValue(self.emit(torch.ops.aten.view.default, value.node, [*lead, *shape]), dims)

    def next_layer(self) -> int:
        """The number of a new op with a state, such as attention; each such op has its own."""
        self._layers += 1
        return self._layers - 1

    def _inputs(self) -> None:
        graph = self.graph.fx
        specs = {s.arg.name: s for s in self.program.graph_signature.input_specs}
        used: dict[str, fx.Node] = {}
        users = iter(self._users())
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            spec = specs[node.name]
            if spec.kind == InputKind.USER_INPUT:
                new, dims = next(users), dims_of(node.meta["val"])
                if T not in dims:
                    raise UnsupportedModel(
                        "the model's code takes the number of tokens as one that is known beforehand"
                    )
                self.values[node] = self.view(TracedValue(new, (T, *type_of(new).shape)), dims)
            elif node.users and spec.kind == InputKind.CONSTANT_TENSOR:
                self.values[node] = self._lifted(node, str(spec.target))
            elif node.users:
                used[str(spec.target).removeprefix("model.")] = node
        for name in self._weight_names(used):
            weight = self.weights[name]
            self._stored[name] = TracedValue(self.graph.add_weight(name, weight), weight.shape)
            if name in used:
                self.values[used[name]] = self._stored[name]
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        for node in reversed(placeholders):  # fx requires placeholders before all other nodes
            next(iter(graph.nodes)).prepend(node)

    def _users(self) -> Iterator[fx.Node]:
        """The graph's placeholders, in the order of the exported program."""
        for name in ("token_ids", "positions"):
            node = self.graph.fx.placeholder(name)
            node.meta["type"] = FIXED_INPUTS[name]
            yield node
        for array in self._declared:
            yield self.graph.declare(array)

    def _weight_names(self, used: Mapping[str, fx.Node]) -> list[str]:
        """The weights of the program and of the layers that were not traced, in a fixed order."""
        names = {*used, *(new for renames in self._renames for old, new in renames.items() if old in used)}
        place = {name: i for i, name in enumerate(self.weights)}
        for name in sorted(names - place.keys()):
            raise TensorError(name, "is missing from the checkpoint, and a text needs it")
        return sorted(names, key=place.__getitem__)

    def _lifted(self, node: fx.Node, name: str) -> TracedValue | Unrepresentable:
        value = self.program.constants[name]
        if isinstance(value, torch.Tensor) and value.numel() == 0:  # a cache before its first token
            value = torch.zeros(value.shape, dtype=value.dtype)
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            return Unrepresentable("a constant without a value", node)
        return self.constant(name.removeprefix("model."), value)

    def _call(self, node: fx.Node) -> Any:
        self._current = node
        if node in self.static.padding:
            return Unrepresentable("a comparison with padding, which no sequence has", node)
        try:
            for follower in self._followers:
                found = follower.follow(self, node)
                if found is not None:
                    return found
        except ValueError as error:
            return Unrepresentable(str(error), node)
        args = [self._arg(a) for a in node.args]
        kwargs = {k: self._arg(v) for k, v in node.kwargs.items()}
        bad = first_unrepresentable([*args, *kwargs.values()])
        found = bad if bad is not None else self._handle(node, args, kwargs)
        if isinstance(found, Unrepresentable) and node in self.static.nodes:
            table = self._table(node)
            return found if table is None else table
        return found

    def _table(self, node: fx.Node) -> TracedValue | None:
        """A value that depends on the position alone, read from a table of all positions, or on nothing, as a constant;
        None for other values."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.is_complex():
            return None
        try:
            dims = dims_of(value)
            if T not in dims:
                return TracedValue(self.constant("computed", self.static.constant(node)).node, dims)
            if len(dims) != value.dim():
                return None
            table = self.static.table(node, dims.index(T), self.max_tokens)
        except ValueError:
            return None
        rows = self.constant("positions_table", table.float() if table.is_floating_point() else table).node
        return TracedValue(self.emit(OPS["embedding"].overload, self.graph.input("positions"), rows), dims)

    def _handle(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        handler = self._handlers.get(op_name(node.target))
        if handler is None and isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymBool)):
            return node.meta["val"]  # arithmetic on sizes
        if handler is None and traits_of(node.target).elementwise:
            handler = self._handlers[DECLARED]
        if handler is None:
            return Unrepresentable("the op is not in the dialect, and no elementwise op of a package", node)
        merged = any(is_merged(self.values.get(n), n.meta.get("val")) for n in node.all_input_nodes)
        try:
            found = handler(self, node, args, kwargs)
            if (merged or is_merged(found, node.meta.get("val"))) and not counts_from_the_end(node):
                return Unrepresentable("tokens and another axis in one", node)
            return found
        except ValueError as error:
            return Unrepresentable(str(error), node)
        except (RuntimeError, TypeError, IndexError, AttributeError, AssertionError) as error:
            # a form that the handler did not expect is refused like any other, unless nothing uses the value
            reason = " ".join(str(error).split())[:200]
            return Unrepresentable(f"an unexpected form ({type(error).__name__}: {reason})", node)

    def _arg(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            found = self.values.get(arg)
            return arg.meta.get("val") if found is None else found
        if isinstance(arg, (list, tuple)):
            return [self._arg(a) for a in arg]
        return arg

    def _output(self, node: fx.Node) -> None:
        value = self.values[node]
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
        if self.graph.picked and T in value.dims:
            raise UnsupportedModel("the model picks one token out of the sequence, and gives all")
        vocab = value.features[-1]
        self.graph.returns(logits=self.view(value, (T, vocab)).node)
