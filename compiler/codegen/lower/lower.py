"""The lowering itself: walks an optimized graph once and emits steps."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ....runtime.engine.program import DRAFTS, KVLayout, Program, Section
from ...errors import UnsupportedModel
from ...graph.graph import LOGIT_ROWS, TOKENS, Graph, type_of
from ...graph.printer import target_name
from .builder import WeightSource, program_buffer, program_weight
from .compute_ops import COMPUTE_LOWERING
from .context import Lowerer, LowerOptions
from .epilogue import fuse_epilogues
from .memory import plan
from .placed import Placed, contiguous
from .shape_ops import SHAPE_LOWERING

__all__ = ["LowerOptions", "Lowered", "lower"]


@dataclass(frozen=True)
class Lowered:
    """The program, what to pack under each weight name, and the module each step came from."""

    program: Program
    sources: dict[str, WeightSource]
    origins: list[str]


def lower(graph: Graph, options: LowerOptions) -> Lowered:
    """Lower an optimized graph and plan its memory; raises UnsupportedModel naming an op that no kernel implements."""
    low = Lowerer(graph, options)
    drafts = graph.draft_nodes()
    _lower_nodes(low, [node for node in graph.nodes if node not in drafts])
    _finish_output(low)
    own = len(low.builder.records)
    _lower_nodes(low, [node for node in graph.nodes if node in drafts])
    _finish_drafts(low)
    return _program(low, own)


def _lower_nodes(low: Lowerer, nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        low.current = node
        if node.op == "placeholder":
            rows = TOKENS if type_of(node).rows == TOKENS else LOGIT_ROWS
            low.values[node] = Placed("input", str(node.target), 0, (), (), 1, "i32", rows)
        elif node.op == "call_function":
            low.values[node] = _lower_call(low, node)


def _lower_call(low: Lowerer, node: fx.Node) -> Any:
    if node.target is operator.getitem:
        return low.values[node.args[0]][node.args[1]]  # type: ignore[index]
    handler = SHAPE_LOWERING.get(node.target) or COMPUTE_LOWERING.get(node.target)  # type: ignore[arg-type]
    if handler is None:
        raise UnsupportedModel(
            f"{target_name(node.target)} in module {node.meta.get('module') or 'model'!r} has no kernel",
            op=target_name(node.target),
            module=node.meta.get("module", ""),
        )
    return handler(low, node)


def _finish_output(low: Lowerer) -> None:
    output = low.graph.output
    value = low.placed(output)
    if value.space != "output":
        low.current = output
        out = Placed("output", "", 0, value.shape, contiguous(value.shape), value.size, "f32", LOGIT_ROWS)
        low.copy(value, out, output)


def _finish_drafts(low: Lowerer) -> None:
    drafts = low.graph.drafts
    if drafts is not None:
        low.current = drafts
        value = low.placed(drafts)
        out = Placed("output", DRAFTS, 0, value.shape, contiguous(value.shape), value.size, "i32", LOGIT_ROWS)
        low.copy(value, out, drafts)


def _program(low: Lowerer, own: int) -> Lowered:
    """`own`: the number of records of a step; those after it are the draft heads' section."""
    builder, profile = low.builder, low.options.profile
    if profile.epilogues:
        own = fuse_epilogues(builder, own)
    buffers = builder.live_buffers()
    offsets, arena = plan(buffers)
    kernels, steps = builder.steps(profile.typed)
    sources = builder.weights
    program = Program(
        kernels=kernels,
        steps=steps,
        buffers=[program_buffer(b, offsets[b.name]) for b in buffers],
        weights={n: program_weight(s, profile.packed_nbytes(s.format, s.shape, s.group)) for n, s in sources.items()},
        kv=KVLayout(
            low.options.block_size, low.options.kv_dtype, [builder.kv_layers[i] for i in sorted(builder.kv_layers)]
        ),
        arena_bytes_per_token=arena,
        vocab_size=type_of(low.graph.output).shape[-1],
        sections=[Section("medusa", own, len(steps))] if own < len(steps) else [],
    )
    return Lowered(program, sources, [record.origin for record in builder.records])
