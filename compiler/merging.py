"""Merges an adapter into a traced model: --lora."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ..passes.quantize.select import retype, set_weight
from ..runtime.adapters.adapter import Adapter, Change, named_as, told_idle
from ..runtime.adapters.bases import other_base, published_name
from ..runtime.adapters.experts import with_experts_together
from ..runtime.adapters.reader import read_adapter
from ..runtime.errors import AdapterError
from .adapter_starts import trained_over
from .frontend.source.gguf.adapters import names_of
from .frontend.source.source import ModelSource
from .graph.graph import Graph
from .ops import OPS
from .progress import Reporter
from .request import CompileRequest
from .resizing import has_vocabulary, settle_vocabulary
from .weights.handles import Constant, Derived, QuantizedWeight, Weight

LINEAR = OPS["linear"].overload
_CHECK = "it was made for another model, or its names are others"


def read_for(graph: Graph, source: ModelSource, path: Path) -> Adapter:
    """Read an adapter for a graph that was traced from `source`; AdapterError if it cannot be read."""
    names = None
    if path.is_file():
        names = names_of(source, {name: tuple(weight.shape) for name, weight in graph.weights.items()})
    return read_adapter(path, names)


def merge_from(path: Path, graph: Graph, source: ModelSource, request: CompileRequest, reporter: Reporter) -> Path:
    """Read an adapter and merge it; returns the directory with the tokenizer of the merged model, which is the
    adapter's if the adapter changed the vocabulary. Raises as `read_for` and `merge_adapter`."""
    before, adapter = graph.info.vocab_size, read_for(graph, source, path)
    given = merge_adapter(graph, adapter, reporter.warn)
    if told := other_base(adapter, published_name(request.options.model)):
        reporter.warn(told)
    if given and request.options.quant == "none":
        reporter.warn(f"{given} weights come quantized; with the adapter in them they are stored as floats")
    if graph.info.vocab_size == before:
        return source.files
    own = (path / "tokenizer.json").is_file()
    whose = "the adapter's" if own else "the model's, because the adapter has none"
    reporter.warn(f"the adapter makes {graph.info.vocab_size} tokens of the model's {before}; the tokenizer is {whose}")
    return path if own else source.files


def merge_adapter(graph: Graph, adapter: Adapter, tell: Callable[[str], object] = lambda line: None) -> int:
    """Merge an adapter into the weights of a traced graph; returns how many of them came quantized and no longer are.

    Weights stay lazy: the change is computed when a weight is loaded. tell: called with a line about changes that were
    left out, see `Change.is_idle`. AdapterError names the first weight that the model lacks or has in another shape; it
    is also raised for an adapter that acts only from some tokens on.
    """
    if adapter.invocation:
        raise AdapterError(
            f"{adapter.path}: it acts only after its invocation tokens (aLoRA), so it cannot be merged",
            "make room for it (--adapters), and load it at run time",
        )
    shapes = {name: tuple(weight.shape) for name, weight in graph.weights.items()}
    given, adapter = 0, named_as(with_experts_together(adapter, shapes), graph.weights)
    resized: dict[str, tuple[int, ...]] = {}
    idle: list[str] = []
    for name, change, shared in _one_by_one(adapter):
        readers = _meant(graph, name, shared)
        if not readers and change.is_idle and len(idle) + 1 < len(adapter.changes):
            idle.append(name)
            continue
        if not readers:
            raise AdapterError(f"{adapter.path}: the model has no weight {name}", _CHECK)
        weight, users = graph.weight(readers[0][0]), [user for _, user in readers]
        if problem := _problem(weight, change, has_vocabulary(graph, users)):
            raise AdapterError(f"{adapter.path}: {name}: {problem}", _CHECK)
        given += isinstance(weight, QuantizedWeight)
        sites = [(user, user.args.index(node)) for node, user in readers]
        changed = _changed(graph, weight, change)
        set_weight(graph, sites, changed)
        if changed.shape != tuple(weight.shape):
            resized[next(own for own, found in graph.weights.items() if found is changed)] = tuple(weight.shape)
        if change.bias is not None:
            _add_bias(graph, users, name, change.bias)
    settle_vocabulary(graph, resized)
    retype(graph)
    if idle:
        tell(told_idle(adapter, idle))
    return given


def _one_by_one(adapter: Adapter) -> Iterator[tuple[str, Change, bool]]:
    """(weight's name, change, whether the change applies to all modules that share the weight): first the weight that
    PEFT's wrapper holds, then the changes that the wrapper adds."""
    for name, change in adapter.changes.items():
        if change.whole is not None and (change.low_rank is not None or change.rows is not None):
            yield name, Change(whole=change.whole), True
            change = replace(change, whole=None)
        yield name, change, change.rows is not None


def _meant(graph: Graph, name: str, shared: bool) -> list[tuple[fx.Node, fx.Node]]:
    """(weight, call) of the calls that a change affects: for a tied matrix all calls if `shared`, else those of one
    module."""
    module = name.rpartition(".")[0]
    readers = list(_readers(graph, name, module))
    if readers and shared:
        nodes = [node for node in graph.nodes if node.op == "get_attr" and node.target == readers[0][0].target]
        return [(node, user) for node in nodes for user in node.users]
    return [(node, user) for node, user in readers if _module(user) in (module, "")] or readers


def _module(node: fx.Node) -> str:
    return str(node.meta.get("module") or "")


def _readers(graph: Graph, name: str, module: str) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(weight, call) of every call that reads the weight `name`; if the graph stores it under the name of a tied
    weight, of every such call in `module`."""
    known = name in graph.weights
    for node in graph.nodes:
        if node.op == "get_attr":
            for user in node.users:
                tied = not known and _module(user) == module and len(graph.weight(node).shape) > 1
                if node.target == name or (tied and name.endswith(".weight")):
                    yield node, user


def _problem(weight: Weight, change: Change, of_tokens: bool) -> str:
    """Why a change does not fit a weight; "" if it fits. of_tokens: the change may alter the number of rows."""
    shape = list(weight.shape)
    turned = [*shape[:-2], *reversed(shape[-2:])]
    stored = turned if change.transposed else shape
    if change.whole is not None:
        given = list(change.whole.shape)
        if given != shape and not (of_tokens and len(given) == len(shape) and given[0] and given[1:] == shape[1:]):
            return f"the model's is {shape}, the adapter's {given}"
    if (rows := change.rows) is not None and (list(rows.values.shape[1:]) != shape[1:] or max(rows.ids) >= shape[0]):
        return f"rows {list(rows.values.shape)} up to {max(rows.ids)} are not of {shape}"
    if (low := change.low_rank) is not None:
        product = [*low.a.shape[:-2], low.b.shape[-2], low.a.shape[-1]]
        if product != stored and not (len(shape) == 3 and product == turned):
            return f"B A is {product}, the weight {stored}"
    if (magnitude := change.magnitude) is not None and (len(shape) != 2 or magnitude.size != stored[0]):
        return f"it has {magnitude.size} magnitudes for {stored}"
    return ""


def _changed(graph: Graph, weight: Weight, change: Change) -> Derived:
    """The weight with the adapter merged, in its own dtype; in the model's dtype if it came quantized."""
    dtype = graph.info.dtype if isinstance(weight, QuantizedWeight) else weight.dtype
    shape = tuple(weight.shape if change.whole is None else change.whole.shape)
    return Derived(_changed_by(change, dtype), (weight,), shape, dtype)


def _changed_by(change: Change, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function from the values of a weight to those with the adapter merged, computed in float32."""

    def apply(value: Tensor) -> Tensor:
        if value.is_meta:
            return value.to(dtype)
        found = value.float().clone() if change.whole is None else _tensor(change.whole).clone()
        if change.rows is not None:
            found[list(change.rows.ids)] = _tensor(change.rows.values)
        if change.low_rank is not None:
            low = change.low_rank
            if change.start is not None:
                found = trained_over(found, change.start, low, change.transposed)
            product = low.scale * (_tensor(low.b) @ _tensor(low.a))
            turned = change.transposed or product.shape != found.shape  # experts may be stored as [E, in, out]
            found += product.mT if turned else product
        if change.magnitude is not None:
            lines = found.mT if change.transposed else found
            lines *= (_tensor(change.magnitude) / torch.linalg.vector_norm(lines, dim=1))[:, None]
        return found.to(dtype)

    return apply


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))


def _add_bias(graph: Graph, users: Sequence[fx.Node], name: str, bias: np.ndarray) -> None:
    """Add a bias to the linear layers that read the weight, or a transpose of it."""
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
