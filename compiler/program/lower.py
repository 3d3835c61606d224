"""The lowering itself: walks an optimized graph once and emits steps."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx

from ...runtime.format.program import DRAFTS, EXIT, HEADS, LOGITS, Section
from ...runtime.format.speculation import Speculation
from ..errors import UnsupportedModel
from ..graph.graph import LOGIT_ROWS, TOKENS, Graph, type_of
from ..graph.printer import target_name
from .builder import Marks, WeightSource, program_buffer, program_weight
from .coded_rows import code_rows
from .context import Lowerer, LowerOptions
from .epilogue import fuse_epilogues
from .joined_norms import join_norms
from .kv_groups import group_layers
from .lowerings import LOWERINGS
from .memory import plan
from .placed import Placed, contiguous
from .program import Program
from .steps.linear import RowProduct

__all__ = ["LowerOptions", "Lowered", "lower"]


@dataclass(frozen=True)
class Lowered:
    """The program, what to pack under each weight name, and the module each step came from. kv_layers: the numbers
    that layers of the graph have in the program's KV cache."""

    program: Program
    sources: dict[str, WeightSource]
    origins: list[str]
    kv_layers: dict[int, int]


def lower(graph: Graph, options: LowerOptions) -> Lowered:
    """Lower an optimized graph and plan its memory; raises UnsupportedModel naming an op that no kernel implements."""
    low = Lowerer(graph, options)
    drafts, early = graph.draft_nodes(), graph.exit_nodes()
    _lower_nodes(low, [node for node in graph.nodes if node not in drafts | early])
    _finish_output(low, graph.output)
    own = len(low.builder.records)
    _lower_nodes(low, [node for node in graph.nodes if node in drafts])
    _finish_drafts(low)
    heads = len(low.builder.records)
    _lower_nodes(low, [node for node in graph.nodes if node in early])
    if graph.exit is not None:
        _finish_output(low, graph.exit)
    shared = {n for node in early for n in node.all_input_nodes if n not in early and n in low.ends}
    return _program(low, Marks(own, heads, max((low.ends[node] for node in shared), default=0)))


def _lower_nodes(low: Lowerer, nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        low.current = node
        if node.op == "placeholder":
            low.values[node] = _lower_input(low, node)
        elif node.op == "call_function":
            low.values[node] = _lower_call(low, node)
            low.ends[node] = len(low.builder.records)


def _lower_input(low: Lowerer, node: fx.Node) -> Placed:
    kind = type_of(node)
    dtype = next((array.dtype for array in low.graph.declared if array.name == node.target), "i32")
    rows = TOKENS if kind.rows == TOKENS else LOGIT_ROWS
    return Placed("input", str(node.target), 0, kind.shape, contiguous(kind.shape), prod(kind.shape), dtype, rows)


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


def _finish_drafts(low: Lowerer) -> None:
    drafts = low.graph.drafts
    if drafts is not None:
        low.current = drafts
        value = low.placed(drafts)
        out = Placed("output", DRAFTS, 0, value.shape, contiguous(value.shape), value.size, "i32", LOGIT_ROWS)
        low.copy(value, out, drafts)


def _program(low: Lowerer, marks: Marks) -> Lowered:
    builder, profile = low.builder, low.options.profile
    if profile.epilogues:
        marks = fuse_epilogues(builder, marks)
    if profile.joins:
        marks = join_norms(builder, marks)
    if profile.coding is not None:
        code_rows(builder, profile.coding)
    buffers = builder.live_buffers()
    offsets, arena = plan(buffers)
    kernels, steps = builder.steps(profile.by_alignment)
    sources = builder.weights
    program = Program(
        kernels=kernels,
        steps=steps,
        buffers=[program_buffer(b, offsets[b.name]) for b in buffers],
        weights={name: program_weight(source) for name, source in sources.items()},
        kv=group_layers(builder.kv_layers, low.options),
        arena_bytes_per_token=arena,
        vocab_size=type_of(low.graph.output).shape[-1],
        inputs=list(low.graph.declared),
        sections=_sections(marks, len(steps)),
        speculation=_heads(low.graph),
        samples=not low.graph.embeds,
        screens=any(isinstance(step, RowProduct) and step.screened for step in steps),
    )
    return Lowered(program, sources, [record.origin for record in builder.records], low.kv_layers)


def _sections(marks: Marks, count: int) -> list[Section]:
    found = [Section(HEADS, marks.own, marks.heads), Section(EXIT, marks.heads, count, marks.shared)]
    return [section for section in found if section.begin < section.end]


def _heads(graph: Graph) -> Speculation | None:
    """How many draft heads there are and how many tokens each names; the trees come later."""
    if graph.drafts is None:
        return None
    return Speculation("medusa", graph.draft_heads, type_of(graph.drafts).shape[0] // graph.draft_heads)
