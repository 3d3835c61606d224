"""Canonical graph text: values renamed in order, types shown, weights inline. Equal graphs print equally."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from .graph import Graph


def target_name(target: Any) -> str:
    """icc.rms_norm, aten.view, getitem."""
    if target is operator.getitem:
        return "getitem"
    schema = getattr(target, "_schema", None)
    name = str(target) if schema is None else str(target.name())
    return name.replace("::", ".").split(".default")[0]


def _format(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_format(v, names) for v in value) + "]"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def print_graph(graph: Graph, modules: bool = False) -> str:
    """One line per node; `modules` adds the module each node came from."""
    names: dict[fx.Node, str] = {}
    lines: list[str] = []
    header: list[str] = []
    count = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = f"%{node.target}"
            header.append(f"%{node.target}: {node.meta['type']}")
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
            lines.append(f"  return {', '.join(_format(a, names) for a in node.args)}")
    return f"graph({', '.join(header)}):\n" + "\n".join(lines) + "\n"
