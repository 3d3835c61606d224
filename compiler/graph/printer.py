"""Canonical graph text: values renamed in order, types shown, weights inline. Equal graphs print equally.

parser.py reads it back. The text leaves out the values of weights, and facts of the model that no op shows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from ...runtime.format.batch import BatchArray
from ..constant_argument import ConstantArgument
from .graph import LOGITS, Graph


def target_name(target: Any) -> str:
    """The name of an op in graph text, such as icc.rms_norm, aten.view, getitem."""
    if target is operator.getitem:
        return "getitem"
    schema = getattr(target, "_schema", None)
    name = str(target) if schema is None else str(target.name())
    return name.replace("::", ".").split(".default")[0]


def constant_text(value: ConstantArgument, shown: Callable[[Any], str]) -> str:
    """`Name{field=value, ...}`, each value as `shown` writes it."""
    stated = ", ".join(f"{name}={shown(part)}" for name, part in value.stated().items())
    return f"{type(value).__name__}{{{stated}}}"


def _format(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_format(v, names) for v in value) + "]"
    if isinstance(value, ConstantArgument):
        return constant_text(value, lambda part: _format(part, names))
    if isinstance(value, float):
        return repr(value)
    return f'"{value}"' if isinstance(value, str) else str(value)


def _output(name: str, value: str) -> str:
    """An output as text; the logits are shown without their name."""
    return value if name == LOGITS else f"{name}={value}"


def _declaration(array: BatchArray) -> str:
    """A declared input as text: how it is stored, and the fill value of rows that no request gives, if it is not 0."""
    fill = f" = {array.fill}" if array.fill else ""
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]{fill}"


def print_graph(graph: Graph, modules: bool = False) -> str:
    """One line per node; `modules` adds the module each node came from."""
    declared = {array.name: _declaration(array) for array in graph.declared}
    names: dict[fx.Node, str] = {}
    lines: list[str] = []
    header: list[str] = []
    count = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = f"%{node.target}"
            bound = f" < {graph.max_seq_len}" if node.target == "positions" and graph.max_seq_len else ""
            shown = declared.get(str(node.target), f"{node.meta['type']}{bound}")
            header.append(f"%{node.target}: {shown}")
        elif node.op == "get_attr":
            names[node] = f"@{node.target}: {graph.weight(node).describe()}"
        elif node.op == "call_function":
            names[node] = f"%{count}"
            count += 1
            found = node.meta["type"]
            shown = f"({', '.join(map(str, found))})" if isinstance(found, tuple) else str(found)
            args = ", ".join(_format(a, names) for a in node.args)
            kwargs = "".join(f", {k}={_format(v, names)}" for k, v in node.kwargs.items())
            note = f"  # {node.meta['module']}" if modules and node.meta.get("module") else ""
            lines.append(f"  {names[node]}: {shown} = {target_name(node.target)}({args}{kwargs}){note}")
        else:
            lines.append(f"  return {', '.join(_output(n, names[v]) for n, v in graph.outputs.items())}")
    return f"graph({', '.join(header)}):\n" + "\n".join(lines) + "\n"
