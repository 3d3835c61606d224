"""Decomposes an exported program into core ATen, node by node.

`ExportedProgram.run_decompositions` traces the whole program twice more to remove in-place writes, which is more than
half of the time of a trace. Models that overwrite only fresh values do not need this: the calls of a composite operator
depend on its operands' types alone, and are recorded while it runs on their fake tensors. `run_decompositions` is used
for all other models.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def decompose(program: ExportedProgram, kept: tuple[str, ...]) -> ExportedProgram:
    """The program over core ATen, changed in place if possible. kept: names of ATen operators that are not
    decomposed."""
    table = {op: fn for op, fn in torch.export.default_decompositions().items() if _name(op) not in kept}
    parts = _parts_of(program.graph, table)
    if parts is None:
        return program.run_decompositions(table)
    became: dict[fx.Node, fx.Node] = {}
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    for node, part in parts.items():
        _replace(node, part, became, order)
        program.graph_signature.replace_all_uses(node.name, became[node].name)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _transposed(x: Any, first: int, second: int) -> tuple[Any, ...]:
    axes = list(range(x.dim()))
    axes[first], axes[second] = axes[second], axes[first]
    return aten.permute.default, axes


def _split(x: Any, chunks: int, axis: int = 0) -> tuple[Any, ...]:
    if not isinstance(size := x.shape[axis], int):
        raise _Unknown
    return aten.split.Tensor, -(-size // chunks), axis


# Operators with another form in core ATen: from their operands, that operator and its operands after the first.
_RESPELLED: dict[OpOverload, Callable[..., tuple[Any, ...]]] = {
    aten._unsafe_view.default: lambda x, shape: (aten.view.default, shape),
    aten.chunk.default: _split,
    aten.squeeze.dim: lambda x, axis: (aten.squeeze.dims, [axis]),
    aten.t.default: lambda x: _transposed(x, 0, 1),
    aten.transpose.int: _transposed,
}
# Operators that create a tensor: from their operands, the general operator and all its operands.
_CREATED: dict[OpOverload, Callable[..., tuple[Any, ...]]] = {
    aten.arange.default: lambda end: (aten.arange.start_step, 0, end, 1),
    aten.arange.start: lambda start, end: (aten.arange.start_step, start, end, 1),
    aten.ones.default: lambda size: (aten.full.default, size, 1),
    aten.zeros.default: lambda size: (aten.full.default, size, 0),
}


def _name(op: Any) -> str:
    return op.name().split("::")[1].split(".")[0]


@dataclass(frozen=True)
class _Result:
    """The result of a recorded call. call: its index in `_Part.calls`."""

    call: int


@dataclass
class _Part:
    """The replacement of a node: calls whose operands are nodes, values and earlier results, and the result among
    these."""

    calls: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=list)
    result: Any = None
    overwritten: fx.Node | None = None  # later uses of this node use the result instead


class _Unknown(Exception):
    """A call was recorded whose operand cannot be traced back to the node's operands."""


class _Recorder(TorchDispatchMode):
    """Records the operators that reach the dispatcher's backends."""

    def __init__(self, known: dict[int, fx.Node], sizes: dict[Any, fx.Node]) -> None:
        super().__init__()
        self.part, self._sizes = _Part(), sizes
        self._known: dict[int, fx.Node | _Result] = {**known}
        self._alive: list[Any] = []  # keeps the tensors alive whose ids are in `_known`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _RESPELLED:
            func, *others = _RESPELLED[func](*args)
            args = (args[0], *others)
        operands, named = self.operand_of(args), self.operand_of(kwargs)
        if isinstance(result, torch.device):  # a query about an operand
            return result
        if not isinstance(result, torch.Tensor):
            raise _Unknown
        self._known[id(result)] = _Result(len(self.part.calls))
        self._alive.append(result)
        self.part.calls.append((func, operands, named, result))
        return result

    def operand_of(self, value: Any) -> Any:
        return tree_map(self._one, value)

    def _one(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._known:
                raise _Unknown
            return self._known[id(value)]
        if isinstance(value, torch.SymInt):
            expression = value.node.expr
            if expression.is_Integer:
                return int(expression)
            if expression not in self._sizes:
                raise _Unknown
            return self._sizes[expression]
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            raise _Unknown
        return value


def _parts_of(graph: fx.Graph, table: Mapping[Any, Any]) -> dict[fx.Node, _Part] | None:
    """The replacement of each composite node; None if a view may see a write, or if a recording is incomplete."""
    sizes: dict[Any, fx.Node] = {}
    parts: dict[fx.Node, _Part] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            sizes.setdefault(value.node.expr, node)
        op = node.target
        if node.op != "call_function" or not isinstance(op, OpOverload):
            continue
        if isinstance(value, torch.SymInt) or not (_is_composite(op, table) or op._schema.is_mutable):
            continue
        try:
            parts[node] = _out_of_place(node, op, parts) if op._schema.is_mutable else _recorded(node, op, sizes)
        except Exception:  # run_decompositions will report the error
            return None
        if any(_is_composite(call[0], table) or call[0]._schema.is_mutable for call in parts[node].calls):
            return None
    return parts


def _is_composite(op: OpOverload, table: Mapping[Any, Any]) -> bool:
    """Whether an operator must be decomposed: it is in the table, or it is a composite that returns views, which the
    table does not list."""
    return op in table or (_implicit(op) and any(result.alias_info is not None for result in op._schema.returns))


def _implicit(op: OpOverload) -> bool:
    """Whether the dispatcher implements it by other operators."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), COMPOSITE)


def _recorded(node: fx.Node, op: OpOverload, sizes: dict[Any, fx.Node]) -> _Part:
    if op in _CREATED:
        other, *operands = _CREATED[op](*node.args)
        value = node.meta["val"]
        return _Part([(other, tuple(operands), {**node.kwargs, "dtype": value.dtype}, value)], _Result(0))
    if op in _RESPELLED:
        x: Any = node.args[0]
        other, *operands = _RESPELLED[op](x.meta["val"], *node.args[1:])
        return _Part([(other, (x, *operands), dict(node.kwargs), node.meta["val"])], _Result(0))
    if not _implicit(op):
        raise _Unknown
    known = {id(n.meta["val"]): n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)}
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    composed = op.py_kernels.get(COMPOSITE, op)  # some C++ kernels read sizes as integers, which makes them constants
    with _Recorder(known, sizes) as recorder:
        result = composed(*args, **kwargs)
    recorder.part.result = recorder.operand_of(result)
    return recorder.part


def _out_of_place(node: fx.Node, op: OpOverload, parts: dict[fx.Node, _Part]) -> _Part:
    """`a.div_(b)` as `a / b`. Raises _Unknown if a value other than `a` may see the write."""
    target = node.args[0]
    other = getattr(getattr(aten, _name(op).removesuffix("_"), None), op._overloadname, None)
    if other is None or not isinstance(target, fx.Node) or node.meta["val"] is None:
        raise _Unknown
    value = target.meta["val"]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    result = other(*args, **kwargs)
    readers = [user for user in target.users if user is not node]
    if result.dtype != value.dtype or result.shape != value.shape or not _is_fresh(target, parts):
        raise _Unknown
    if any(not isinstance(user.target, OpOverload) or _may_alias(user.target) for user in readers):
        raise _Unknown
    return _Part([(other, node.args, dict(node.kwargs), result)], _Result(0), target)


def _is_fresh(node: fx.Node, parts: dict[fx.Node, _Part]) -> bool:
    """Whether no other node shares memory with this one, apart from views of it."""
    if node in parts:
        result = parts[node].result
        return isinstance(result, _Result) and not _may_alias(parts[node].calls[result.call][0])
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return isinstance(node.target, OpOverload) and not _may_alias(node.target)


def _may_alias(op: OpOverload) -> bool:
    """Whether a result may share memory with an operand. The schema of a composite operator need not say so."""
    return _implicit(op) or any(result.alias_info is not None for result in op._schema.returns)


def _replace(node: fx.Node, part: _Part, became: dict[fx.Node, fx.Node], order: dict[fx.Node, int]) -> None:
    """Put the calls of a part before the node, and its result in the node's place.

    became: the new nodes of nodes that were replaced. order: the position of each node in the original graph.
    """
    new: list[fx.Node] = []

    def operand(value: Any) -> Any:
        return new[value.call] if isinstance(value, _Result) else became.get(value, value)

    about = {key: value for key, value in node.meta.items() if key != "val"}
    with node.graph.inserting_before(node):
        for op, args, kwargs, result in part.calls:
            made = node.graph.call_function(op, tree_map(operand, args), tree_map(operand, kwargs))
            made.meta = {**about, "val": result}
            new.append(made)
    result = operand(part.result)
    node.replace_all_uses_with(result)
    if part.overwritten is not None:
        overwritten = became.get(part.overwritten, part.overwritten)
        overwritten.replace_all_uses_with(result, lambda user: order.get(user, -1) > order[node])
        became[part.overwritten] = result
    became[node] = result
    node.graph.erase_node(node)
