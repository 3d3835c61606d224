"""Makes the program of a planned compile without reading a weight: the passes and the lowering run on shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...passes import pipelines
from ...passes.base import Pass, PassContext
from ...passes.manager import run_passes
from ...passes.parallel.stages import CostOf
from ...passes.quantize.auto import QuantizeAuto
from ...runtime.format.footprint import Footprint, footprint
from ...runtime.format.manifest import Limits
from ..adapted import adapted_graph
from ..backends.base import Backend
from ..backends.registry import backend_for
from ..caches import choose_caches, lower_options
from ..engine.manifest import make_limits
from ..frontend.load import load_graph
from ..frontend.source.source import ModelSource
from ..graph.graph import Graph
from ..merging import merge_adapter, read_for
from ..ops import OPS
from ..options import CompileOptions
from ..program.lower import lower
from ..program.program import Program
from ..sizing import byte_budget, rotated
from ..targets import Target

_EXPERTS = OPS["expert_linear"].overload


@dataclass(frozen=True)
class PlannedCompile:
    """A compile up to its kernels: the optimized graph, its program, and the sizes of its engine."""

    graph: Graph
    program: Program
    backend: Backend
    limits: Limits
    memory: Footprint
    kept: tuple[str, ...]


@dataclass(frozen=True)
class PlannedGraph:
    """An optimized graph. kept: linears that are not quantized, with reasons. quantized: the graph before attention was
    fused. source: where it was read from. adapted: the graph with adapter slots; None without --adapters."""

    graph: Graph
    kept: tuple[str, ...]
    quantized: Graph
    source: ModelSource
    adapted: Graph | None = None


def plan_graph(source: ModelSource, options: CompileOptions, encodes: bool = False) -> PlannedGraph:
    """The optimized graph of `source`. encodes: as in `pipelines.quantize`. Raises what `compile_engine` raises."""
    graph = load_graph(source, options.max_seq_len, task=options.task, policy=options.eviction)
    if options.lora is not None:
        merge_adapter(graph, read_for(graph, source, options.lora))
    context = PassContext()
    for phase in (pipelines.canonicalize(), _quantize(options, graph, encodes)):
        run_passes(graph, phase, context)
    quantized = graph.copy()
    run_passes(graph, pipelines.attention(options.eviction), context)
    adapted = _adapted(graph, options, source)
    run_passes(graph, pipelines.fuse(), context)
    kept = tuple(sorted({f"{r.node}: {r.reason}" for r in context.refusals if r.rule == "quantize"}))
    return PlannedGraph(graph, kept, quantized, source, adapted)


def divided_graph(
    planned: PlannedGraph,
    options: CompileOptions,
    tensors: int,
    experts: int,
    stages: int,
    cost: CostOf,
    rows: bool = False,
) -> PlannedGraph | None:
    """The graph that one of several ranks runs, see `pipelines.parallel`; None if the model cannot be divided in this
    way."""
    graph = planned.quantized.copy()
    divide = pipelines.parallel(tensors, experts, stages, cost, rows)
    for phase in (pipelines.attention(options.eviction), divide):
        run_passes(graph, phase, PassContext())
    if graph.ranks == 1 or (experts > 1 and not _has_experts(planned.quantized)):
        return None
    adapted = _adapted(graph, options, planned.source)
    run_passes(graph, pipelines.fuse(), PassContext())
    return replace(planned, graph=graph, adapted=adapted)


def _adapted(graph: Graph, options: CompileOptions, source: ModelSource) -> Graph | None:
    """A graph after attention with adapter slots; None without --adapters."""
    slots = options.adapter_slots
    return None if slots is None else adapted_graph(graph, slots, source)


def _has_experts(graph: Graph) -> bool:
    return any(node.target is _EXPERTS for node in graph.nodes)


def plan_program(planned: PlannedGraph, options: CompileOptions, target: Target) -> PlannedCompile:
    """Lower an optimized graph for `target`, as `compile_engine` does. The graph is not changed."""
    graph = planned.graph
    backend = backend_for(target, graph.info.weight_dtype, options.deterministic, step_kernel=options.step_kernel)
    limits = make_limits(graph, replace(options, target=target.name))
    lowering = lower_options(graph, options, backend, limits)
    if options.kv_bits is not None:
        lowering, _ = choose_caches(graph, graph, lowering, backend, options.kv_bits, ())
    program = lower(graph, lowering, adapted=planned.adapted).program
    memory = footprint(program, limits, target.backend, backend.scratch_bytes(program, limits))
    return PlannedCompile(graph, program, backend, limits, memory, planned.kept)


def _quantize(options: CompileOptions, graph: Graph, encodes: bool) -> Sequence[Pass]:
    """The quantization passes of the options without calibration, which give each weight the same format."""
    if options.quant == "auto":
        chosen = QuantizeAuto(keep=options.keep, budget=byte_budget(options, graph), searches=False)
        return (*rotated(options), chosen)
    asked = (options.quant, options.quant_head, options.keep, (), options.group_size)
    return pipelines.quantize(*asked, plans=True, rotate=options.rotate, encodes=encodes)
