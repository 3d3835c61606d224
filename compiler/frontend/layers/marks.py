"""The marks around a traced layer, and the op that stands for an equal layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .values import PLAIN, Opaque, mapped


@torch.library.custom_op("icc_trace::enter", mutates_args=())
def enter(x: Tensor, kind: int, slot: int) -> Tensor:
    """Mark `x`, of any shape, as the input `slot` of the first layer of a kind."""
    return x.clone()


@torch.library.custom_op("icc_trace::leave", mutates_args=())
def leave(x: Tensor, kind: int, slot: int) -> Tensor:
    """Mark `x`, of any shape, as the result `slot` of the first layer of a kind."""
    return x.clone()


@torch.library.custom_op("icc_trace::repeated", mutates_args=())
def repeated(inputs: list[Tensor], like: Tensor, repeats: list[int], slots: list[int]) -> Tensor:
    """The result `slots[0]` of the layer `repeats[0]`, which is not traced, in the form of `like`.

    inputs: those that differ from the inputs of the first layer of its kind. With several numbers, each layer reads the
    given result of the one before it, and differs in nothing else.
    """
    raise NotImplementedError("only traced, never run")


enter.register_fake(lambda x, kind, slot: torch.empty_like(x))
leave.register_fake(lambda x, kind, slot: torch.empty_like(x))
repeated.register_fake(lambda inputs, like, repeats, slots: torch.empty_like(like))

ENTER = torch.ops.icc_trace.enter.default
LEAVE = torch.ops.icc_trace.leave.default
REPEATED = torch.ops.icc_trace.repeated.default


@dataclass(frozen=True)
class _Given:
    """A result that is one of the inputs."""

    slot: int


@dataclass(frozen=True)
class _Left:
    """A result that is no input; `like` is the mark, of the result's shape."""

    slot: int
    like: Tensor


def enter_all(tensors: list[Tensor], kind: int) -> list[Tensor]:
    """The inputs of the first layer of a kind, of any shape, marked."""
    return [torch.ops.icc_trace.enter(t, kind, slot) for slot, t in enumerate(tensors)]


def leave_all(outcome: Any, entered: list[Tensor], kind: int) -> Any:
    """The outcome of the first layer of a kind as a pattern for `resolved`. Raises Opaque. entered: the result of
    `enter_all`, of any shape."""
    known: dict[int, Any] = {id(t): _Given(slot) for slot, t in enumerate(entered)}
    left: list[Tensor] = []  # keeps the tensors alive, so that their ids are not reused

    def mark(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            if type(leaf) not in PLAIN:
                raise Opaque(type(leaf).__name__)
            return leaf
        if id(leaf) not in known:
            slot = len(left)
            left.append(leaf)
            known[id(leaf)] = _Left(slot, torch.ops.icc_trace.leave(leaf, kind, slot))
        return known[id(leaf)]

    return mapped(outcome, mark)


def resolved(pattern: Any, tensors: list[Tensor], own: Callable[[int, Tensor], Tensor]) -> Any:
    """The outcome of a layer with the inputs `tensors`, of any shape; `own(slot, like)` makes each result that is no
    input."""
    made: dict[int, Tensor] = {}

    def resolve(leaf: Any) -> Any:
        if isinstance(leaf, _Given):
            return tensors[leaf.slot]
        if isinstance(leaf, _Left):
            if leaf.slot not in made:
                made[leaf.slot] = own(leaf.slot, leaf.like)
            return made[leaf.slot]
        return leaf

    return mapped(pattern, resolve)


def kinds_that_write_through_views(graph: torch.fx.Graph) -> set[int]:
    """The kinds whose layer, in a program that is not decomposed yet, writes to a tensor through a view of it."""
    found: set[int] = set()
    kind: Any = None
    for node in graph.nodes:
        if node.target in (ENTER, LEAVE):
            kind = node.args[1] if node.target is ENTER else None
        elif kind is not None and any(_is_view(arg) for arg in _written(node)):
            found.add(kind)
    return found


def _written(node: torch.fx.Node) -> list[Any]:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    names = [a.name for a in schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _is_view(node: Any) -> bool:
    """Whether a node may be a view of another; the result of an in-place op is the operand that it writes to."""
    schema = getattr(getattr(node, "target", None), "_schema", None)
    while schema is not None and schema.is_mutable and schema.returns:
        node = _written(node)[0]
        schema = getattr(getattr(node, "target", None), "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def join_repeated(graph: torch.fx.Graph) -> None:
    """Join the nodes of consecutive repeated layers, each of which only passes a result to the next, into one node.

    Decomposing a program takes memory and time for every node.
    """
    for node in list(graph.nodes):
        if node.target is not REPEATED or len(node.args[0]) != 1:
            continue
        (before,), like, repeats, slots = node.args
        if before.target is REPEATED and before is node.prev and len(before.users) == 1:
            inputs, _, earlier, passed = before.args
            node.args = (inputs, like, [*earlier, *repeats], [*passed, *slots])
            graph.erase_node(before)
