"""The lowering itself: walks an optimized graph once and emits steps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx

from ...runtime.format.adapters import ADAPTER, ADAPTER_SECTION
from ...runtime.format.program import LOGITS, SectionArray, section_behind
from ..errors import UnsupportedModel
from ..graph.graph import Graph
from ..graph.printer import target_name
from ..graph.tensor_types import DRAFT_ROWS, LOGIT_ROWS, TOKENS, type_of
from .adapters import adapter_plan
from .builder import VirtualBuffer, WeightSource, program_buffer, program_weight
from .context import Lowerer, LowerOptions
from .kv_groups import group_layers
from .lowerings import LOWERINGS
from .memory import plan
from .placed import Placed, contiguous
from .program import Program
from .rewrite import StepRewrite
from .rewrites import REWRITES, Observer, run_rewrites
from .stages import with_pools_of_stages
from .steps.base import FLOATS
from .steps.linear import RowProduct

__all__ = ["LowerOptions", "Lowered", "lower"]


@dataclass(frozen=True)
class Lowered:
    """The program, the source to pack for each weight name, and the module each step came from. kv_layers: the numbers
    in the program's KV cache, by the layers' numbers in the graph."""

    program: Program
    sources: dict[str, WeightSource]
    origins: list[str]
    kv_layers: dict[int, int]


def lower(
    graph: Graph,
    options: LowerOptions,
    observe: Observer = lambda report, program: None,
    rewrites: tuple[StepRewrite, ...] = REWRITES,
    adapted: Graph | None = None,
) -> Lowered:
    """Lower an optimized graph, rewrite its steps and plan its memory.

    observe: called with the steps after the lowering and after each rewrite, see rewrites.py. adapted: the graph with
    adapter slots, which becomes the section that runs instead if requests of a batch use adapters; None: no slots.
    Raises UnsupportedModel naming an op that no kernel implements.
    """
    low = Lowerer(graph, options)
    low.builder.declared = graph.declared
    asked = graph.section_nodes()
    _lower_nodes(low, [node for node in graph.nodes if node not in asked])
    _finish_output(low, graph.output)
    for name in graph.sections:
        _lower_section(low, name)
    if adapted is not None:
        _lower_adapted(low, adapted)
    run_rewrites(low.builder, options.profile, lambda: _unplaced(low), observe, rewrites)
    origins = [record.origin for record in low.builder.records]
    return Lowered(with_pools_of_stages(_planned(low), graph.parts), low.builder.weights, origins, low.kv_layers)


def _lower_section(low: Lowerer, name: str, behind: str = "") -> None:
    """Lower a section of the graph, which runs after a step of the program, or of the program's section `behind`."""
    called = section_behind(behind, name)
    with low.section(called):
        nodes = low.graph.section_nodes(name)
        _lower_nodes(low, [node for node in low.graph.nodes if node in nodes])
        for own, node in low.graph.sections[name].items():
            low.builder.gives[called][own] = _finish_section(low, own, node)
    if LOGITS in low.graph.sections[name] and (given := _given_for(low.graph, nodes)):
        low.builder.instead[called] = given


def _given_for(graph: Graph, nodes: set[fx.Node]) -> str:
    """The declared input that only these nodes of a section read, so that a batch with it runs the section; "" for
    none."""
    declared = {array.name for array in graph.declared if not array.is_asked}
    inputs = [n for n in graph.nodes if n.op == "placeholder" and n.target in declared and n.users]
    return next((str(n.target) for n in inputs if nodes.issuperset(n.users)), "")


def _lower_adapted(low: Lowerer, graph: Graph) -> None:
    """Lower a graph with adapter slots as a section of the program under construction, and lower the sections that run
    after a step again, because they read results of its steps."""
    builder, own = low.builder, Lowerer(graph, low.options, beside=low)
    with own.section(ADAPTER_SECTION):
        asked = graph.section_nodes()
        _lower_nodes(own, [node for node in graph.nodes if node not in asked])
        _finish_output(own, graph.output)
        builder.gives[ADAPTER_SECTION][LOGITS] = SectionArray("f32", [type_of(graph.output).shape[-1]], LOGITS)
        for name, outputs in graph.sections.items():
            if LOGITS not in outputs:
                _lower_section(own, name, ADAPTER_SECTION)
    builder.instead[ADAPTER_SECTION] = ADAPTER.name
    builder.declared = tuple(dict.fromkeys((*builder.declared, *graph.declared)))
    builder.adapters = adapter_plan(graph, builder, low.options.profile)


def _lower_nodes(low: Lowerer, nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        low.current = node
        if node.op == "placeholder":
            low.values[node] = _lower_input(low, node)
        elif node.op == "call_function":
            low.values[node] = _lower_call(low, node)


def _lower_input(low: Lowerer, node: fx.Node) -> Placed:
    kind, name = type_of(node), str(node.target)
    dtype = next((array.dtype for array in low.graph.declared if array.name == name), "i32")
    if kind.rows == DRAFT_ROWS:
        return _lower_given(low, node, dtype)
    rows = TOKENS if kind.rows == TOKENS else LOGIT_ROWS
    return Placed("input", str(node.target), 0, kind.shape, contiguous(kind.shape), prod(kind.shape), dtype, rows)


def _lower_given(low: Lowerer, node: fx.Node, dtype: str) -> Placed:
    """The place of a section's input. The input of row numbers lies where a step's logit rows do."""
    shape, name = type_of(node).shape, str(node.target)
    given = low.builder.given.get(low.builder.section, {})  # an input without readers has no section
    if name == DRAFT_ROWS:
        given[name] = SectionArray(dtype, [], LOGIT_ROWS)
        return Placed("input", name, 0, (), (), 1, dtype, LOGIT_ROWS)
    placed = low.builder.buffer(shape, dtype, LOGIT_ROWS)
    given[name] = SectionArray(dtype, list(shape), placed.name)
    return placed


def _lower_call(low: Lowerer, node: fx.Node) -> Any:
    if node.target is operator.getitem:
        return low.values[node.args[0]][node.args[1]]  # type: ignore[index]
    handler = LOWERINGS.get(node.target)
    if handler is None:
        raise UnsupportedModel(
            f"{target_name(node.target)} in module {node.meta.get('module') or 'model'!r} has no kernel",
            op=target_name(node.target),
            module=node.meta.get("module", ""),
        )
    return handler(low, node)


def _finish_output(low: Lowerer, output: fx.Node) -> None:
    value = low.placed(output)
    if value.space != "output":
        low.current = output
        out = Placed("output", LOGITS, 0, value.shape, contiguous(value.shape), value.size, "f32", LOGIT_ROWS)
        low.copy(value, out, output)


def _finish_section(low: Lowerer, name: str, node: fx.Node) -> SectionArray:
    """The place of a section's result: logits where the program's are, other results as float32 or int32 in a
    buffer."""
    if name == LOGITS:
        _finish_output(low, node)
        return SectionArray("f32", [type_of(node).shape[-1]], LOGITS)
    low.current = node
    value = low.placed(node)
    dtype = "f32" if value.dtype in FLOATS else "i32"
    if value.space == "buffer" and value.is_whole and value.dtype == dtype:
        return SectionArray(dtype, list(value.shape), value.name)
    out = low.builder.buffer(value.shape, dtype, LOGIT_ROWS)
    low.copy(value, out, node)
    return SectionArray(dtype, list(value.shape), out.name)


def _planned(low: Lowerer) -> Program:
    """The program with its buffers placed in the arena."""
    return _assembled(low, plan)


def _unplaced(low: Lowerer) -> Program:
    """The program between rewrites, when its buffers have no places yet."""
    return _assembled(low, lambda buffers: (dict.fromkeys((b.name for b in buffers), 0), 0))


def _assembled(low: Lowerer, place: Callable[[list[VirtualBuffer]], tuple[dict[str, int], int]]) -> Program:
    builder = low.builder
    sections = builder.sections()
    buffers = builder.live_buffers(sections)
    offsets, arena = place(buffers)
    kernels, steps = builder.steps(low.options.profile.by_alignment)
    return Program(
        kernels=kernels,
        steps=steps,
        buffers=[program_buffer(b, offsets[b.name]) for b in buffers],
        weights={name: program_weight(source) for name, source in builder.weights.items()},
        kv=group_layers(builder.kv_layers, low.options),
        arena_bytes_per_token=arena,
        vocab_size=type_of(low.graph.output).shape[-1],
        inputs=[array for array in builder.declared if not array.is_asked],
        adapters=builder.adapters,
        sections=sections,
        samples=not low.graph.embeds,
        screens=any(isinstance(step, RowProduct) and step.screened for step in steps),
    )
