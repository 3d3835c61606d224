"""Merges an adapter into a model that was traced: --lora."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ..passes.quantize.select import retype, set_weight
from ..runtime.adapters.adapter import Adapter, Change, LowRank, named_as
from ..runtime.adapters.experts import with_experts_together
from ..runtime.adapters.reader import read_adapter
from ..runtime.errors import AdapterError
from .frontend.source.gguf.adapters import names_of
from .frontend.source.source import ModelSource
from .graph.graph import Graph
from .ops import OPS
from .weights.handles import Constant, Derived, QuantizedWeight, Weight

LINEAR = OPS["linear"].overload
_CHECK = "it was made for another model, or its names are others"


def read_for(graph: Graph, source: ModelSource, path: Path) -> Adapter:
    """An adapter for a graph as it was traced, from `source`; AdapterError where it cannot be read."""
    names = None
    if path.is_file():
        names = names_of(source, {name: tuple(weight.shape) for name, weight in graph.weights.items()})
    return read_adapter(path, names)


def merge_adapter(graph: Graph, adapter: Adapter) -> int:
    """Change the weights of a graph as it was traced; how many of them came quantized, and no longer are.

    Weights stay lazy: what is added is computed when a weight is loaded. AdapterError naming the first weight that the
    model does not have, or has in another shape, and for an adapter that counts from some tokens on only.
    """
    if adapter.invocation:
        raise AdapterError(
            f"{adapter.path}: it counts from its invocation tokens on (aLoRA), so that it cannot be merged",
            "make room for it (--adapters), and load it at run time",
        )
    shapes = {name: tuple(weight.shape) for name, weight in graph.weights.items()}
    given, adapter = 0, named_as(with_experts_together(adapter, shapes), graph.weights)
    for name, change in adapter.changes.items():
        module = name.rpartition(".")[0]
        readers = list(_readers(graph, name, module))
        if not readers:
            raise AdapterError(f"{adapter.path}: the model has no weight {name}", _CHECK)
        if change.rows is not None:  # of a tied matrix, for all that read it
            shared = [node for node in graph.nodes if node.op == "get_attr" and node.target == readers[0][0].target]
            readers = [(node, user) for node in shared for user in node.users]
        else:
            readers = [(node, user) for node, user in readers if _module(user) in (module, "")] or readers
        weight = graph.weight(readers[0][0])
        if problem := _problem(weight, change):
            raise AdapterError(f"{adapter.path}: {name}: {problem}", _CHECK)
        given += isinstance(weight, QuantizedWeight)
        sites = [(user, user.args.index(node)) for node, user in readers]
        set_weight(graph, sites, _changed(graph, weight, change))
        if change.bias is not None:
            _add_bias(graph, [user for _, user in readers], name, change.bias)
    retype(graph)
    return given


def _module(node: fx.Node) -> str:
    return str(node.meta.get("module") or "")


def _readers(graph: Graph, name: str, module: str) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(weight, call) of every call that reads a weight of that name, or, where that is the same as another's, of the
    module that should have it."""
    known = name in graph.weights
    for node in graph.nodes:
        if node.op == "get_attr":
            for user in node.users:
                tied = not known and _module(user) == module and len(graph.weight(node).shape) > 1
                if node.target == name or (tied and name.endswith(".weight")):
                    yield node, user


def _problem(weight: Weight, change: Change) -> str:
    """Why a weight cannot change so; "" if it can."""
    shape = list(weight.shape)
    turned = [*shape[:-2], *reversed(shape[-2:])]
    stored = turned if change.transposed else shape
    if change.whole is not None and list(change.whole.shape) != shape:
        return f"the model's is {shape}, the adapter's {list(change.whole.shape)}"
    if (rows := change.rows) is not None and (list(rows.values.shape[1:]) != shape[1:] or max(rows.ids) >= shape[0]):
        return f"rows {list(rows.values.shape)} up to {max(rows.ids)} are not of {shape}"
    if (low := change.low_rank) is not None:
        product = [*low.a.shape[:-2], low.b.shape[-2], low.a.shape[-1]]
        if product != stored and not (len(shape) == 3 and product == turned):
            return f"B A is {product}, the weight {stored}"
    if (magnitude := change.magnitude) is not None and (len(shape) != 2 or magnitude.size != stored[0]):
        return f"it has {magnitude.size} magnitudes for {stored}"
    return ""


def _changed(graph: Graph, weight: Weight, change: Change) -> Weight:
    """The weight as the adapter makes it, in the type that it has; of one that came quantized, in the model's."""
    dtype = graph.info.dtype if isinstance(weight, QuantizedWeight) else weight.dtype
    return Derived(_changed_by(change, dtype), (weight,), tuple(weight.shape), dtype)


def _changed_by(change: Change, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function of the values of a weight: those that an adapter makes of them, computed in float32."""

    def apply(value: Tensor) -> Tensor:
        if value.is_meta:
            return value.to(dtype)
        found = value.float().clone() if change.whole is None else _tensor(change.whole).clone()
        if change.rows is not None:
            found[list(change.rows.ids)] = _tensor(change.rows.values)
        if change.low_rank is not None:
            low = change.low_rank
            if change.start is not None:
                lines = found.mT if change.transposed else found
                lines -= _began_as(lines, change.start, low)
            product = low.scale * (_tensor(low.b) @ _tensor(low.a))
            turned = change.transposed or product.shape != found.shape  # experts may be stored as [E, in, out]
            found += product.mT if turned else product
        if change.magnitude is not None:
            lines = found.mT if change.transposed else found
            lines *= (_tensor(change.magnitude) / torch.linalg.vector_norm(lines, dim=1))[:, None]
        return found.to(dtype)

    return apply


def _began_as(weight: Tensor, start: str, low: LowRank) -> Tensor:
    """What PEFT has taken from a base [out, in] before training A and B, which began as that: see `Change.start`."""
    if start == "olora":
        q, r = torch.linalg.qr(weight)
        return low.scale * (q[:, : low.rank] @ r[: low.rank])
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    return (u[:, : low.rank] * s[: low.rank]) @ v[: low.rank]


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))


def _add_bias(graph: Graph, users: Sequence[fx.Node], name: str, bias: np.ndarray) -> None:
    """Add to what the linear layer gives that reads the weight, or a transpose of it."""
    for user in users:
        linears = [user] if user.target is LINEAR else [one for one in user.users if one.target is LINEAR]
        for linear in linears:
            _, _, old = linear.args
            with graph.fx.inserting_before(linear):
                linear.update_arg(
                    2, graph.add_weight(f"{name.removesuffix('.weight')}.bias", _summed(graph, old, bias))
                )


def _summed(graph: Graph, old: Any, bias: np.ndarray) -> Weight:
    added = _tensor(bias)
    if old is None:
        return Constant(added.to(graph.info.dtype))
    weight = graph.weight(old)
    return Derived(lambda value: (value.float() + added).to(weight.dtype), (weight,), tuple(weight.shape), weight.dtype)
