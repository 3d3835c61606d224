"""The verifier: checks that a graph holds only the ops of its stage, and that its types are right."""

from __future__ import annotations

import operator
from enum import StrEnum

from torch import fx

from ..errors import VerifyError
from ..ops import op_of
from .graph import HIDDEN, LOGITS, Graph
from .printer import target_name
from .tensor_types import FIXED_INPUTS, infer_type, input_type, type_of, weight_type


class Stage(StrEnum):
    """exported: the graph that the frontend made. optimized: only ops that the code generators know."""

    EXPORTED = "exported"
    OPTIMIZED = "optimized"


def is_pointwise(node: fx.Node) -> bool:
    """Whether the node is an elementwise op that generic fusion can merge."""
    op = op_of(node.target)
    return op is not None and op.instructions is not None


def _allowed(node: fx.Node, stage: Stage) -> bool:
    if node.target is operator.getitem:
        return True
    op = op_of(node.target)
    return op is not None and (stage is Stage.EXPORTED or op.instructions is None)


def verify(graph: Graph, stage: Stage, pass_name: str) -> None:
    """Raise VerifyError naming the first node that breaks the stage's rules."""
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        problem = _problem(graph, node, seen, stage)
        if problem:
            raise VerifyError(stage, pass_name, f"{node.name} = {target_name(node.target)}", problem)
        seen.add(node)


def _problem(graph: Graph, node: fx.Node, seen: set[fx.Node], stage: Stage) -> str:
    if any(arg not in seen for arg in node.all_input_nodes):
        return "uses a value before it is defined"
    if node.op == "get_attr":
        if str(node.target) not in graph.weights:
            return "names a weight that the graph does not have"
        same = weight_type(graph.weight(node)) == node.meta["type"]
        return "" if same else "has another type than its weight"
    if node.op == "call_function":
        if not _allowed(node, stage):
            return "is not an op of this stage"
        try:
            inferred = infer_type(node)
        except Exception as error:
            return f"does not accept its operands: {str(error).splitlines()[0]}"
        return "" if inferred == node.meta["type"] else f"has type {node.meta['type']}, its operands give {inferred}"
    return _output_problem(graph, node) if node.op == "output" else _input_problem(graph, node)


def _input_problem(graph: Graph, node: fx.Node) -> str:
    declared = {array.name: input_type(array) for array in graph.declared}
    known = (FIXED_INPUTS | declared).get(str(node.target))
    if known is None:
        return "is an input that the graph does not declare"
    return "" if known == node.meta["type"] else f"has type {node.meta['type']}, the input is of type {known}"


def _output_problem(graph: Graph, node: fx.Node) -> str:
    if not isinstance(node.args[0], dict) or (LOGITS in graph.outputs) == (HIDDEN in graph.outputs):
        return "must return logits or hidden states, by name"
    result = graph.output
    if not isinstance(result, fx.Node) or isinstance(result.meta["type"], tuple) or len(type_of(result).shape) != 1:
        return "must return logits with one row per token or logit row"
    for section, outputs in graph.sections.items():
        for name, output in outputs.items():
            if not (section.isidentifier() and name.isidentifier()):
                return f"returns {f'{section}.{name}'.strip('.')}, which names no section and no output of one"
            if isinstance(output.meta["type"], tuple) or type_of(output).rows is None:
                return f"must return {section}.{name} as one value per row"
            if name == LOGITS and type_of(output) != type_of(result):
                return f"must return {section}.{name} of the type of its logits"
    return ""
