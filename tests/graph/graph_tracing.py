"""Graphs for tests from small Python functions.

`trace(fn, x="f32[T, 4, 8]", w="f32[8]")` calls `fn` with symbolic values and returns the Graph of its operations:

    graph = trace(lambda x, w: x * aten.rsqrt.default(mean(x * x) + 1e-6) * w, x="f32[T, 8]", w="f32[8]")

An input with rows (T) is a gather from a random table by the token ids, an input without rows is a random weight, a
tensor or Weight is used directly, a BatchArray is declared; "token_ids" and "positions" are the graph's own inputs.
Values have the arithmetic operators and go through any torch.ops overload. The result is viewed as logits [T, n].
"""

from __future__ import annotations

import operator
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from icc.compiler.graph.graph import Graph, ModelInfo
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.printer import print_graph
from icc.compiler.graph.tensor_types import TensorType
from icc.compiler.ops import OPS
from icc.compiler.weights.handles import Constant, Weight
from icc.passes.base import Pass, PassContext, Refusal
from icc.passes.manager import run_passes
from icc.runtime.format.batch import BatchArray
from torch import Tensor, fx

aten = torch.ops.aten
icc = torch.ops.icc
attention, paged_attention = OPS["attention"].overload, OPS["paged_attention"].overload

VOCAB = 16
IDS = [3, 14, 0, 9, 3, 7, 15, 1, 12]
MAX_SEQ_LEN = 24
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64, "bool": torch.bool}


@dataclass(frozen=True, eq=False)
class Value:
    """A node with arithmetic operators, which torch.ops also accepts."""

    graph: Graph
    node: fx.Node

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        graph = _graph_of(args)
        assert graph is not None and not kwargs
        node = graph.call(func, *_nodes(args))
        if not isinstance(node.meta["type"], tuple):
            return Value(graph, node)
        return tuple(Value(graph, graph.call(operator.getitem, node, i)) for i in range(len(node.meta["type"])))

    def __add__(self, other: Any) -> Value:
        return aten.add.Tensor(self, other)

    def __sub__(self, other: Any) -> Value:
        return aten.sub.Tensor(self, other)

    def __mul__(self, other: Any) -> Value:
        return aten.mul.Tensor(self, other)

    def __truediv__(self, other: Any) -> Value:
        return aten.div.Tensor(self, other)

    def __neg__(self) -> Value:
        return aten.neg.default(self)

    def view(self, *shape: int) -> Value:
        return aten.view.default(self, list(shape))

    def slice(self, axis: int, start: int, end: int, step: int = 1) -> Value:
        return aten.slice.Tensor(self, axis, start, end, step)


def _graph_of(value: Any) -> Graph | None:
    if isinstance(value, Value):
        return value.graph
    if isinstance(value, (list, tuple)):
        return next((found for found in map(_graph_of, value) if found is not None), None)
    return None


def _nodes(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_nodes(v) for v in value)
    return value.node if isinstance(value, Value) else value


def cat(values: Sequence[Value], axis: int) -> Value:
    return aten.cat.default(list(values), axis)


def mean(x: Value) -> Value:
    """The mean over the last axis, which stays with size 1, as the frontend writes it."""
    *lead, _ = x.node.meta["type"].full_shape
    return icc.reduce.default(x, "mean", len(lead)).view(*lead, 1)


def random(name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values that depend on the name only."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def empty_graph(max_seq_len: int = MAX_SEQ_LEN) -> Graph:
    info = ModelInfo("Test", VOCAB, 64, 1, 0, None, torch.float32)
    return Graph(fx.Graph(), {}, info, max_seq_len=max_seq_len)


def _placeholder(graph: Graph, name: str) -> Value:
    node = graph.fx.placeholder(name)
    node.meta["type"] = TensorType("tokens", (), torch.int64)
    return Value(graph, node)


def _input(graph: Graph, tokens: Value, name: str, spec: str | Tensor | Weight | BatchArray) -> Value:
    if isinstance(spec, BatchArray):
        return Value(graph, graph.declare(spec))
    if isinstance(spec, (Tensor, Weight)):
        weight = Constant(spec) if isinstance(spec, Tensor) else spec
        return Value(graph, graph.add_weight(name, weight))
    found = re.fullmatch(r"(\w+)\[(.*)\]", spec)
    assert found is not None, spec
    dtype, sizes = _DTYPES[found[1]], [s.strip() for s in found[2].split(",")]
    if sizes[0] != "T":
        return _input(graph, tokens, name, random(name, [int(s) for s in sizes], dtype))
    table = random(name, [VOCAB, *(int(s) for s in sizes[1:])], dtype)
    return icc.embedding.default(tokens, _input(graph, tokens, name, table))


def trace(
    fn: Callable[..., Any],
    max_seq_len: int = MAX_SEQ_LEN,
    keep_dead: bool = False,
    **inputs: str | Tensor | Weight | BatchArray,
) -> Graph:
    """The graph of `fn` over the named inputs; see the module's docstring."""
    graph = empty_graph(max_seq_len)
    own = {"token_ids": _placeholder(graph, "token_ids")}
    if "positions" in inputs:
        own["positions"] = _placeholder(graph, "positions")
    tokens = own["token_ids"]
    values = {name: own.get(name) or _input(graph, tokens, name, spec) for name, spec in inputs.items()}
    result = fn(**values)
    shape = result.node.meta["type"].shape
    if len(shape) != 1:
        result = result.view(-1, int(torch.Size(shape).numel()))
    graph.returns(logits=result.node)
    if not keep_dead:
        graph.sweep()
    return graph


@dataclass
class Applied:
    """A graph after passes: `text` shows it before and after."""

    graph: Graph
    text: str
    counts: dict[str, int]
    refusals: list[Refusal] = field(default_factory=list)

    @property
    def reasons(self) -> list[str]:
        """The reasons of rules that refused, each once."""
        return list(dict.fromkeys(r.reason for r in self.refusals if r.reason))

    @property
    def ops(self) -> list[str]:
        """Names of the calls, in order."""
        return [n.target.name().removesuffix(".default") for n in self.graph.nodes if hasattr(n.target, "name")]


def difference(before: Tensor, after: Tensor) -> float:
    """max |after - before| / max |before|."""
    assert before.shape == after.shape
    scale = float(before.to(torch.float64).abs().max())
    return float((after.to(torch.float64) - before.to(torch.float64)).abs().max()) / (scale or 1.0)


def apply(item: Pass, graph: Graph, ids: Sequence[int] = IDS) -> Applied:
    """Run one pass, and check the invariants of every pass.

    The reference interpreter's numbers are the same within the pass's tolerance, the graph verifies (the manager does
    that), and a second run modifies nothing.
    """
    before, text = interpret(graph, ids), print_graph(graph)
    ctx = PassContext()
    report = run_passes(graph, [item], ctx)[0]
    assert item.tolerance is not None
    after_text = print_graph(graph)
    assert difference(before, interpret(graph, ids)) <= item.tolerance, f"{item.name} changed the numbers"
    assert report.modified == (after_text != text) == bool(report.counts), "modified does not tell the truth"
    again = item.run(graph, PassContext())  # not by the manager: the pass may have broken facts that it requires
    assert not again.modified and print_graph(graph) == after_text, f"a second {item.name} changes the graph again"
    return Applied(graph, f"{text}-- {item.name}\n{after_text}", report.counts, list(ctx.refusals))


__all__ = [
    "IDS",
    "MAX_SEQ_LEN",
    "OPS",
    "VOCAB",
    "Applied",
    "Value",
    "apply",
    "aten",
    "cat",
    "difference",
    "empty_graph",
    "icc",
    "mean",
    "random",
    "trace",
]
