"""Selects the linear layers to quantize and their formats; layers left unquantized are reported with the reason."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import fx

from ...compiler.errors import UsageError
from ...compiler.graph.facts import Fact
from ...compiler.graph.graph import LOGITS, Graph
from ...compiler.graph.tensor_types import infer_type, type_of, weight_type
from ...compiler.ops import OPS, traits_of
from ...compiler.weights.formats.base import Misfit, StorageFormat
from ...compiler.weights.formats.grouped import GROUPS, GroupFormat
from ...compiler.weights.formats.registry import find_format
from ...compiler.weights.handles import QuantizedWeight, Weight
from ..base import Pass, PassContext, Refusal
from ..quantized import QuantRecord

LINEAR, EXPERT, EMBEDDING, COLUMNS = (OPS[n].overload for n in ("linear", "expert_linear", "embedding", "columns"))
MIN_OUTPUTS = 16


@dataclass(frozen=True)
class WeightJob:
    """A weight to quantize, and the linear nodes that use it (several if layers share it).

    own: whether the pass's method chooses the codes; else weights are rounded to nearest. tables: embeddings that read
    the same matrix and will read it quantized.
    """

    name: str
    nodes: tuple[fx.Node, ...]
    format: StorageFormat
    own: bool = True
    tables: tuple[fx.Node, ...] = ()

    @property
    def node(self) -> fx.Node:
        """The first node that uses the weight."""
        return self.nodes[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N, K] of the weight."""
        return tuple(type_of(self.node.args[1]).shape)  # type: ignore[arg-type]


@dataclass(frozen=True)
class QuantizePass(Pass):
    """The options of all quantization passes.

    format: the storage format by name (see `find_format`). group: values per scale. any_group: use fewer if K is not a
    multiple; else raise UsageError.
    keep: patterns (fnmatch) over names of weights and modules that are left as stored. head: the format of the LM head;
    None leaves it as stored. A token embedding that is the same matrix is stored once with it if the format serves
    tables, and stays as stored if not. only: a prefix; weights with other names are ignored. device: torch's name of
    the device on which calibrated passes compute.
    """

    requires: ClassVar[frozenset[str]] = frozenset({Fact.NORMS})

    format: str = "q4"
    group: int = 128
    keep: tuple[str, ...] = field(default=())
    head: str | None = "q8"
    only: str = ""
    device: str = "cpu"
    any_group: bool = True

    def jobs(self, graph: Graph, ctx: PassContext) -> list[WeightJob]:
        """The weights to quantize, in execution order; refusals are added to `ctx`."""
        return select(graph, self, ctx)

    def finish(self, graph: Graph, ctx: PassContext, job: WeightJob, weight: QuantizedWeight, **facts: Any) -> None:
        """Store `weight` as the job's weight and record it."""
        source = graph.weight(job.node.args[1])  # type: ignore[arg-type]
        set_weight(graph, [(node, 1) for node in (*job.nodes, *job.tables)], weight)
        method = self.name.removeprefix("quantize-") if job.own else "rtn"
        ctx.quant_records.append(QuantRecord(job.name, method, job.format.name, weight, source=source, **facts))


def plain_name(node: fx.Node) -> str:
    """The checkpoint's name of the weight behind a get_attr node, without the number that made it unique."""
    return str(node.target).split("#")[0]


def select(graph: Graph, options: QuantizePass, ctx: PassContext) -> list[WeightJob]:
    """Jobs in execution order; raises UsageError for a `keep` pattern that matches no linear layer."""
    by_weight: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (LINEAR, EXPERT):
            weight = node.args[1]
            assert isinstance(weight, fx.Node)
            key = str(weight.target) if weight.op == "get_attr" else weight.name
            if not key.startswith(options.only):
                continue
            by_weight.setdefault(key, []).append(node)
    heads, jobs, used = lm_heads(graph), [], set()
    heads |= _section_heads(graph)
    for nodes in by_weight.values():
        found = _job(graph, nodes, nodes[0] in heads, options, used)
        if isinstance(found, Refusal):
            ctx.refusals.append(found)
        elif found is not None:
            jobs.append(found)
    unused = [pattern for pattern in options.keep if pattern not in used]
    if unused:
        names = sorted({plain_name(nodes[0].args[1]) for nodes in by_weight.values()})  # type: ignore[arg-type]
        hint = f"names look like {names[0]}" if names else "the model has no linear layers"
        raise UsageError(f"--keep {unused[0]!r} matches no linear layer", hint)
    return jobs


def _job(
    graph: Graph, nodes: list[fx.Node], is_head: bool, options: QuantizePass, used: set[str]
) -> WeightJob | Refusal | None:
    weight_node = nodes[0].args[1]
    assert isinstance(weight_node, fx.Node)
    name = plain_name(weight_node)
    kept = [p for p in options.keep if any(_matches(p, name, node) for node in nodes)]
    used.update(kept)
    if weight_node.op != "get_attr":
        return Refusal("quantize", nodes[0].name, "its weight is computed in the graph, not stored")
    stored = graph.weight(weight_node)
    if isinstance(stored, QuantizedWeight) and not stored.given:
        return None
    wanted = options.head if is_head else options.format
    if kept:
        reason = f"kept by --keep {kept[0]}"
    elif wanted is None:
        reason = "LM head, left as stored (head=none)"
    elif not is_head and any(feeds_topk(node) for node in nodes):
        reason = "router: its outputs choose experts"
    else:
        fitted = _fit(find_format(wanted, options.group), weight_node.meta["type"].shape)
        if not options.any_group:
            _check_group(name, weight_node.meta["type"].shape[-1], options.group, fitted)
        if not isinstance(fitted, str):
            tables = _tables(weight_node) if is_head and fitted.serves_tables else ()
            return WeightJob(name, tuple(nodes), fitted, wanted == options.format, tables)
        reason = fitted
    return Refusal("quantize", name, reason)


def _fit(wanted: StorageFormat, shape: Sequence[int]) -> StorageFormat | str:
    """The format for a weight of `shape`, or the reason why it is not quantized."""
    *_, n, k = shape
    try:
        fitted = wanted.fitted(k)
    except Misfit as misfit:
        return str(misfit)
    return fitted if n >= MIN_OUTPUTS else f"only {n} outputs: nothing to gain"


def _check_group(name: str, k: int, group: int, fitted: StorageFormat | str) -> None:
    """Raise UsageError if a weight cannot have the requested groups."""
    if isinstance(fitted, GroupFormat) and fitted.group != group:
        sizes = ", ".join(str(size) for size in reversed(GROUPS) if k % size == 0)
        raise UsageError(
            f"--group-size {group} does not divide the {k} inputs of {name}",
            f"groups that do: {sizes}; or leave the layer as it is: --keep {name.removesuffix('.weight')}",
        )


def _tables(weight: fx.Node) -> tuple[fx.Node, ...]:
    """The embeddings that read a weight."""
    return tuple(user for user in weight.users if user.target is EMBEDDING and user.args[1] is weight)


def _matches(pattern: str, name: str, node: fx.Node) -> bool:
    names = (name, name.removesuffix(".weight"), str(node.meta.get("module") or ""))
    return any(fnmatchcase(candidate, pattern) for candidate in names if candidate)


def lm_heads(graph: Graph) -> set[fx.Node]:
    """Linear nodes whose result reaches the logits only through views and elementwise ops."""
    found: set[fx.Node] = set()
    if graph.embeds:
        return found
    for node in _walk([graph.output], lambda n: n.all_input_nodes, _is_transparent):
        if node.target is LINEAR:
            found.add(node)
    return found


def _section_heads(graph: Graph) -> set[fx.Node]:
    """Linear nodes whose results sections choose tokens from: those before a section's own logits, and those of draft
    heads."""
    named = graph.sections
    choosing = [name for name, outputs in named.items() if LOGITS not in outputs]
    heads = {n for n in (graph.section_nodes(*choosing) if choosing else ()) if n.target is LINEAR and feeds_topk(n)}
    ends = [outputs[LOGITS] for outputs in named.values() if LOGITS in outputs]
    return heads | {n for n in _walk(ends, lambda n: n.all_input_nodes, _keeps_scores) if n.target is LINEAR}


def feeds_topk(node: fx.Node) -> bool:
    """Whether expert choice reads the result of `node`, through softmax, views and elementwise ops."""
    users = _walk(list(node.users), lambda n: list(n.users), _routes)
    return any(traits_of(user.target).selects for user in users)


def _is_transparent(node: fx.Node) -> bool:
    asked = traits_of(node.target)
    return asked.moves_only or asked.elementwise or asked.selects_rows or asked.collective


def _keeps_scores(node: fx.Node) -> bool:
    return _is_transparent(node) or node.target is COLUMNS  # logits of another vocabulary are reordered by `columns`


def _routes(node: fx.Node) -> bool:
    return _is_transparent(node) or traits_of(node.target).routes or node.target is operator.getitem


def _walk(start: Sequence[fx.Node], step: Any, through: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """Nodes reached from `start`; the walk continues past nodes for which `through` is true."""
    stack, seen = list(start), set(start)
    while stack:
        node = stack.pop()
        yield node
        if through(node):
            fresh = [n for n in step(node) if n not in seen]
            seen.update(fresh)
            stack += fresh


def set_weight(graph: Graph, sites: Sequence[tuple[fx.Node, int]], weight: Weight) -> None:
    """Make `weight` argument i of each (node, i) of `sites`, which all read one weight; its other readers keep the old
    weight."""
    old = [node.args[index] for node, index in sites]
    first = old[0]
    assert isinstance(first, fx.Node) and first.op == "get_attr"
    readers = [(n, u) for n in graph.nodes if n.op == "get_attr" and n.target == first.target for u in n.users]
    inside = {node for node, _ in sites}
    if all(reader in inside for _, reader in readers) and sum(_reads(u, n) for n, u in readers) == len(sites):
        graph.weights[str(first.target)] = weight
        for node, _ in readers:
            node.meta["type"] = weight_type(weight)
        return
    order = {node: i for i, node in enumerate(graph.nodes)}
    with graph.fx.inserting_before(min(inside, key=lambda n: order[n])):
        fresh = graph.add_weight(plain_name(first), weight)
    for node, index in sites:
        node.update_arg(index, fresh)


def retype(graph: Graph) -> None:
    """Infer all types again: a weight that was float16 or bfloat16 may be float32 now."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["type"] = infer_type(node)


def _reads(user: fx.Node, node: fx.Node) -> int:
    count = 0

    def see(found: fx.Node) -> fx.Node:
        nonlocal count
        count += found is node
        return found

    fx.map_arg(user.args, see)
    return count


def as_float(weight: Weight) -> torch.Tensor:
    """The values in float32, in the weight's shape."""
    return weight.load().to(torch.float32)
