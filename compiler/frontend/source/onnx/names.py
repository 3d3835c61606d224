"""Recovers the exported model's names of weights and modules from the names of tensors and nodes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from onnx import NodeProto

_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
_NAMESPACE = "namespace"  # torch's exporter writes "path: class/path: class/node: op"
_WEIGHTS = ("MatMul", "Gemm", "Gather", "MatMulNBits", "Transpose", "GatherBlockQuantized", "Linear")


def scope_of(node: NodeProto) -> str:
    """The module that a node comes from, such as model.layers.0.mlp; "" if the node's name does not show it."""
    for entry in node.metadata_props:
        if entry.key == _NAMESPACE:
            parts = [part.partition(":")[0].strip() for part in entry.value.split("/")]
            return _valid(parts[-2]) if len(parts) > 1 else ""
    if node.name.startswith("/"):
        return _valid(".".join(node.name.split("/")[1:-1]))
    return ""


def _valid(path: str) -> str:
    return path if path and all(path.split(".")) else ""


def weight_names(nodes: Sequence[NodeProto], tensors: Mapping[str, object]) -> dict[str, str]:
    """A qualified name for each tensor: its own, or one from the module that reads it. No name is a prefix path of
    another."""
    readers: dict[str, NodeProto] = {}
    for node in nodes:
        for name in [*node.input, *node.output]:
            if name in tensors:
                readers.setdefault(name, node)
    found: dict[str, str] = {}
    taken: Counter[str] = Counter()
    for name in tensors:
        path = _named(name, readers.get(name))
        taken[path] += 1
        found[name] = path if taken[path] == 1 else f"{path}_{taken[path]}"
    folders = {path.rpartition(".")[0] for path in found.values()}
    inside = {folder[:i] for folder in folders for i in [*_dots(folder), len(folder)]}
    return {name: f"{path}_" if path in inside else path for name, path in found.items()}


def _dots(path: str) -> list[int]:
    return [i for i, c in enumerate(path) if c == "."]


def _named(name: str, reader: NodeProto | None) -> str:
    if _PATH.fullmatch(name):
        return name.removesuffix(".codes")
    plain = re.sub(r"\W+", "_", name).strip("_") or "constant"
    scope = scope_of(reader) if reader is not None else ""
    if not scope or reader is None:
        return plain
    if reader.op_type in _WEIGHTS:
        return f"{scope}.weight"
    return f"{scope}.bias" if reader.op_type == "Add" else f"{scope}.{plain}"
