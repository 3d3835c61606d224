"""Chains of elementwise operations become generated kernels.

Every elementwise aten op is turned into an `icc.pointwise`; a producer is merged into its consumer if it has the
consumer's shape and no other reader, so that the intermediate value never reaches memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ...compiler.errors import PassError
from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import Graph
from ...compiler.graph.tensor_types import type_of
from ...compiler.graph.verify import is_pointwise
from ...compiler.ops import OPS, op_of
from ...compiler.ops.body import Argument, Body, BodyWriter, Operand
from ...compiler.ops.pointwise import OPCODES
from ..base import Pass, PassContext, PassResult

POINT = OPS["pointwise"].overload
MAX_INPUTS = 8


@dataclass(frozen=True)
class FusePointwise(Pass):
    """Fuse backwards from each elementwise node that something else reads."""

    name: ClassVar[str] = "fuse-pointwise"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.FOLDED, Fact.NORMS, Fact.ROPE})
    ensures: ClassVar[frozenset[str]] = frozenset({Fact.OPTIMIZED})
    breaks: ClassVar[frozenset[str]] = frozenset({Fact.UNIQUE})

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        counts: Counter[str] = Counter()
        for node in reversed(list(graph.nodes)):
            if not _fusible(node) or not node.users:
                continue
            fused = _Fusion(node)
            if node.target is POINT and len(fused.members) == 1:
                continue
            with graph.fx.inserting_before(node):
                graph.replace(node, graph.call(POINT, fused.inputs, str(fused.body), origin=node))
            counts["kernels"] += 1
            counts["fused-ops"] += len(fused.members)
            for member in reversed(fused.members):  # readers before their producers
                if not member.users:
                    graph.fx.erase_node(member)
        return PassResult(bool(counts), counts)


def _fusible(node: fx.Node) -> bool:
    return is_pointwise(node) or node.target is POINT


def _members(root: fx.Node) -> set[fx.Node]:
    """`root` and the producers of its shape that only members read."""
    kind = type_of(root)
    members, frontier = {root}, True
    while frontier:
        frontier = False
        inputs = {n for m in members for n in m.all_input_nodes} - members
        for node in sorted(inputs, key=lambda n: n.name):
            alike = _fusible(node) and type_of(node).shape == kind.shape and type_of(node).rows == kind.rows
            operands = (inputs | set(node.all_input_nodes)) - members - {node}
            if alike and all(user in members for user in node.users) and len(operands) <= MAX_INPUTS:
                members.add(node)
                frontier = True
                break
    return members


class _Fusion:
    """The instructions of `root` and of the producers merged into it."""

    def __init__(self, root: fx.Node) -> None:
        self.inputs: list[fx.Node] = []
        self.members: list[fx.Node] = []
        self._writer = BodyWriter()
        self._chosen = _members(root)
        self._results: dict[fx.Node, Operand] = {}
        self.body = self._writer.finish(self._emit(root))
        self._check_opcodes()

    def _check_opcodes(self) -> None:
        """Raise PassError if an op of a package writes an instruction that no back end supports."""
        unknown = {found.opcode for found in self.body.instructions} - set(OPCODES)
        if unknown:
            ops = ", ".join(sorted({str(member.target) for member in self.members}))
            raise PassError(
                f"instructions of {ops}: there is no opcode {min(unknown)!r}", f"known: {', '.join(OPCODES)}"
            )

    def _operand(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if value in self._results:
            return self._results[value]
        if value in self._chosen:
            return self._emit(value)
        if value not in self.inputs:
            self.inputs.append(value)
        return Argument(self.inputs.index(value))

    def _emit(self, node: fx.Node) -> Operand:
        write = self._writer
        if node.target is POINT:
            inputs, text = node.args
            result = write.inline(Body.parse(str(text)), [self._operand(value) for value in inputs])  # type: ignore[union-attr]
        else:
            declared = op_of(node.target)
            assert declared is not None and declared.instructions is not None  # else it would not be fusible
            result = declared.instructions(write, *(_whole(self._operand(a), node) for a in node.args))
        self._results[node] = result
        self.members.append(node)
        return result


def _whole(operand: Any, node: fx.Node) -> Any:
    """The operand, written as a float if it is an integer in a float operation."""
    is_number = isinstance(operand, int) and not isinstance(operand, bool)
    floats = [n for n in node.all_input_nodes if type_of(n).dtype.is_floating_point]
    return float(operand) if is_number and floats else operand
