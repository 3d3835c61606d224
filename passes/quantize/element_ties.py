"""How the elements of a value follow from the elements of its operands, for ops through which a scale can travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...compiler.graph.graph import Graph
from ...compiler.graph.printer import target_name
from ...compiler.graph.tensor_types import type_of
from ...compiler.ops import traits_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Tie:
    """Element out[i] of a value scales as element source[i] of `operand`, which is its argument number `arg`."""

    operand: fx.Node
    arg: int
    out: Tensor
    source: Tensor


def full_shape(node: fx.Node) -> torch.Size:
    """Shape of the value with one row."""
    kind = type_of(node)
    return torch.Size(kind.shape if kind.rows is None else (1, *kind.shape))


def is_absorbing(node: fx.Node) -> bool:
    """Whether the node's own weights can absorb a scale per output channel."""
    return node.op == "call_function" and bool(traits_of(node.target).absorbs)


def ties(graph: Graph, node: fx.Node) -> list[Tie] | str:
    """The ties of a call, or its name if a scale cannot travel through it. Other operands must not be scaled."""
    target, asked = node.target, traits_of(node.target)
    if node.op != "call_function" or isinstance(node.meta["type"], tuple):
        return target_name(target) if node.op == "call_function" else "an input of the model"
    x = node.args[0] if node.args else None
    if target is aten.cat.default:
        return _cat(node)
    if asked.moves_only and isinstance(x, fx.Node):
        index = target(torch.arange(full_shape(x).numel()).view(full_shape(x)), *node.args[1:])  # type: ignore[operator]
        return [Tie(x, 0, torch.arange(index.numel()), index.reshape(-1))]
    if asked.homogeneous and all(_is_float(node.args[i]) for i in asked.homogeneous):
        return [_broadcast(node, i) for i in asked.homogeneous]
    if asked.attention:
        return [_values(node)]
    if target is aten.mul.Tensor:
        carrier = _factor(graph, node)
        if carrier is not None:
            return [_broadcast(node, carrier)]
        return "a product whose factors are not linear in any layer's output"
    return target_name(target)


def _is_float(arg: Any) -> bool:
    return isinstance(arg, fx.Node) and type_of(arg).dtype.is_floating_point


def _cat(node: fx.Node) -> list[Tie]:
    parts: Any = node.args[0]
    found: list[Tie] = []
    for part in parts:
        pieces = [
            torch.arange(full_shape(p).numel()).view(full_shape(p)) if p is part else torch.full(full_shape(p), -1)
            for p in parts
        ]
        if part.op != "get_attr" and all(tie.operand is not part for tie in found):
            index = torch.cat(pieces, *node.args[1:]).reshape(-1)  # type: ignore[arg-type]
            out = torch.nonzero(index >= 0).reshape(-1)
            found.append(Tie(part, 0, out, index[out]))
    return found


def _broadcast(node: fx.Node, arg: int) -> Tie:
    operand = node.args[arg]
    assert isinstance(operand, fx.Node)
    shape, out = full_shape(operand), full_shape(node)
    index = torch.arange(shape.numel()).view(shape).expand(out).reshape(-1)
    return Tie(operand, arg, torch.arange(out.numel()), index)


def _values(node: fx.Node) -> Tie:
    """Output channel d of query head h is a mean of channel d of the values of its KV head."""
    v = node.args[2]
    assert isinstance(v, fx.Node)
    (_, heads, dim), kv_heads = full_shape(node), full_shape(v)[1]
    head = torch.arange(heads) // (heads // kv_heads)
    index = head[:, None] * dim + torch.arange(dim)
    return Tie(v, 2, torch.arange(heads * dim), index.reshape(-1))


def _factor(graph: Graph, node: fx.Node) -> int | None:
    """The factor of a product that takes the scale: a constant vector, or a value that leads back to a linear layer or
    norm; None if neither."""
    width = full_shape(node)[-1]
    nodes = [(i, a) for i, a in enumerate(node.args[:2]) if isinstance(a, fx.Node)]
    for i, a in nodes:
        if a.op == "get_attr" and full_shape(a) and full_shape(a)[-1] == width and width > 1:
            return i
    if len(nodes) == 1 and nodes[0][1].op != "get_attr":
        other = node.args[1 - nodes[0][0]]
        return nodes[0][0] if isinstance(other, (int, float)) and other != 0 else None
    carrying = [(i, a) for i, a in nodes if a.op != "get_attr" and full_shape(a)[-1] == width and _carries(graph, a, 0)]
    return min(carrying, key=lambda found: len(found[1].users))[0] if carrying else None


def _carries(graph: Graph, node: fx.Node, depth: int) -> bool:
    if is_absorbing(node):
        return True
    if depth > 24:
        return False
    found = ties(graph, node)
    if isinstance(found, str):
        return False
    return bool(found) and all(t.operand.op == "get_attr" or _carries(graph, t.operand, depth + 1) for t in found)
