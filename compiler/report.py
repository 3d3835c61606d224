"""The report of a compile, for report.json, the manifest and the summary.

It holds no times: equal compiles give equal reports.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import msgspec
import torch
from torch import fx

from ..passes.manager import PassReport
from ..runtime.format.program import Program
from .graph.graph import Graph
from .graph.tensor_types import LOGIT_ROWS, TOKENS, TensorType
from .ops import Traits, op_of
from .ops.base import Cost
from .options import CompileOptions
from .phases import Phases, PhaseSnapshot, layer_of
from .program.profile import Profile
from .recorded import recorded
from .targets import Target
from .weights.handles import QuantizedWeight, pieces_of


@dataclass(frozen=True)
class RooflineRow:
    """Work of all calls of one op in one step. `seconds` is the lower bound by the target's bandwidth and peak."""

    op: str
    calls: int
    flops: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class LayerRows:
    """The roofline of each of several equal layers; `layers` is empty for calls that belong to no layer."""

    layers: list[int]
    rows: list[RooflineRow]


@dataclass(frozen=True)
class CompileReport:
    """Facts about one compile. Bytes are of packed weights; bits_per_weight is over all parameters. machine: the
    figures behind the roofline, in GB/s, TFLOP/s and TOP/s. roofline and roofline_layers: by the kind of step. refused:
    tilings of GPU kernels that a check refused, and why. launched: kernels that --step-kernel left as separate
    launches, and why. tuned: blocks of the CPU products that --tune chose instead of
    the default. allocation: the choice of --quant auto and its alternatives; see Allocation. caches: the same for
    --kv-bits; bytes are of a sequence of full length. options: those that differ from their defaults; see recorded.py.
    model: for an engine with adapter slots, the model that was compiled, see `published_name`; else ""."""

    target: str
    quant: str
    num_parameters: int
    weight_bytes: int
    bits_per_weight: float
    arena_bytes_per_token: int
    kv_bytes_per_token: float
    steps: int
    kernels: int
    fused: dict[str, int]
    kept: list[str]
    passes: list[dict[str, Any]]
    quantization: list[dict[str, Any]]
    machine: dict[str, float]
    roofline: dict[str, list[RooflineRow]]
    roofline_layers: dict[str, list[LayerRows]]
    stages: list[PhaseSnapshot]
    objects: list[dict[str, Any]]
    speculation: dict[str, Any] | None
    tuned: list[str]
    given: dict[str, int] = field(default_factory=dict)
    allocation: dict[str, Any] | None = None
    caches: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    refused: list[str] = field(default_factory=list)
    launched: list[str] = field(default_factory=list)
    engine_bytes: int = field(default=0, compare=False)

    def to_json(self) -> bytes:
        """The content of report.json."""
        facts = asdict(self)
        facts.pop("engine_bytes")
        for name in ("given", "allocation", "caches", "model", "refused", "launched"):
            if not facts[name]:
                facts.pop(name)
        return json.dumps(facts, indent=1).encode() + b"\n"


def make_report(
    graph: Graph,
    program: Program,
    phases: Phases,
    options: CompileOptions,
    target: Target,
    profile: Profile,
    tuned: list[str],
) -> CompileReport:
    """Collect the facts; weights must be packed already, so that their errors are known."""
    weight_bytes = graph.ranks // graph.stages * sum(w.nbytes for w in program.stored.values())
    fused: Counter[str] = Counter()
    for report in phases.reports:
        fused.update(report.counts)
    steps = {"decode": 1, "prefill_512": 512}  # tokens
    return CompileReport(
        target=target.name,
        quant=options.quant,
        num_parameters=graph.info.num_parameters,
        weight_bytes=weight_bytes,
        bits_per_weight=round(8 * weight_bytes / max(1, graph.info.num_parameters), 3),
        arena_bytes_per_token=program.arena_bytes_per_token,
        kv_bytes_per_token=program.kv.bytes_per_token(),
        steps=len(program.steps),
        kernels=len(program.kernels),
        fused=dict(sorted(fused.items())),
        kept=sorted({f"{r.node}: {r.reason}" for p in phases.reports for r in p.refusals if r.rule == "quantize"}),
        passes=[_pass_facts(r) for r in phases.reports],
        quantization=[r.as_json() for r in phases.records],
        machine={"bandwidth": target.bandwidth, "peak_f16": target.peak_f16, "peak_i8": target.peak_i8},
        roofline={name: _roofline(graph, graph.nodes, target, profile, n) for name, n in steps.items()},
        roofline_layers={name: _by_layer(graph, target, profile, n) for name, n in steps.items()},
        stages=phases.stages,
        objects=program.plan.resources() if program.plan else [],
        speculation=None if program.speculation is None else msgspec.to_builtins(program.speculation),
        tuned=tuned,
        given=_given(graph),
        allocation=phases.allocation and phases.allocation.as_json(),
        caches=phases.caches and phases.caches.as_json(),
        options=recorded(options),
    )


def _given(graph: Graph) -> dict[str, int]:
    """The number of weights by the format that they have in the checkpoint."""
    names = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    kinds = [pieces_of(graph.weights[name]) for name in sorted(names)]
    given = [w.storage.name for weights in kinds for w in weights if isinstance(w, QuantizedWeight) and w.given]
    return dict(sorted(Counter(given).items()))


def _pass_facts(report: PassReport) -> dict[str, Any]:
    refusals = [asdict(r) for r in report.refusals if r.reason]
    return {
        "phase": report.phase,
        "name": report.name,
        "modified": report.modified,
        "calls": report.calls,
        "counts": dict(report.counts),
        "refusals": refusals,
    }


def _by_layer(graph: Graph, target: Target, profile: Profile, tokens: int) -> list[LayerRows]:
    """The roofline of each layer, and of calls that belong to no layer; equal layers are combined."""
    nodes: dict[int | None, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        nodes[layer_of(node)].append(node)
    found: list[LayerRows] = []
    for layer, own in sorted(nodes.items(), key=lambda item: -1 if item[0] is None else item[0]):
        rows = _roofline(graph, own, target, profile, tokens)
        alike = next((other for other in found if other.layers and layer is not None and other.rows == rows), None)
        if alike is not None and layer is not None:
            alike.layers.append(layer)
        elif rows:
            found.append(LayerRows([] if layer is None else [layer], rows))
    return found


def _roofline(
    graph: Graph, nodes: Iterable[fx.Node], target: Target, profile: Profile, tokens: int
) -> list[RooflineRow]:
    """Per op: flops, bytes (weights in their storage type) and the least time that the target needs, for one step."""
    rows: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    asked, roof = graph.section_nodes(), target.roofline()
    for node in nodes:
        cost = None if node in asked else node_cost(graph, node, {"tokens": tokens, "logit_rows": 1}, profile)
        if cost is None:
            continue
        op = op_of(node.target)
        assert op is not None, "what has a cost is declared"
        row = rows[op.name]
        row[0] += 1
        row[1] += cost.flops
        row[2] += cost.bytes
        row[3] += roof.seconds(cost.bytes, cost.flops)
    return [RooflineRow(name, int(r[0]), r[1], r[2], r[3]) for name, r in sorted(rows.items())]


def node_cost(graph: Graph, node: fx.Node, counts: Mapping[str, int], profile: Profile) -> Cost | None:
    """The work of one node for `counts` rows of each kind, with weights as a back end stores them; None if the node has
    no cost."""
    op = op_of(node.target)
    if op is None or op.cost is None:
        return None
    cost = op.cost(*(_argument(graph, a, counts) for a in node.args))
    stored_less = _stored_less(graph, node.args[1], profile) if _streams(op.traits) else 0.0  # type: ignore[arg-type]
    return Cost(cost.flops, cost.bytes - stored_less)


def token_seconds(target: Target, profile: Profile) -> Callable[[Graph, fx.Node], float]:
    """The least seconds that a call takes for one token, by the roofline of a target."""
    roof = target.roofline()

    def seconds(graph: Graph, node: fx.Node) -> float:
        cost = node_cost(graph, node, {TOKENS: 1, LOGIT_ROWS: 1}, profile)
        return roof.seconds(cost.bytes, cost.flops) if cost else 0.0

    return seconds


def _streams(traits: Traits) -> bool:
    """Whether each call reads the op's whole weight in its stored form."""
    return bool(traits.product and traits.absorbs)


def _argument(graph: Graph, arg: Any, counts: Mapping[str, int]) -> Any:
    if isinstance(arg, fx.Node):
        kind = arg.meta["type"]
        assert isinstance(kind, TensorType)
        rows = () if kind.rows is None else (counts[kind.rows],)
        return torch.empty((*rows, *kind.shape), dtype=kind.dtype, device="meta")
    if isinstance(arg, (list, tuple)):
        return [_argument(graph, a, counts) for a in arg]
    return arg


def _stored_less(graph: Graph, node: fx.Node, profile: Profile) -> float:
    """Bytes that the layout of a matrix saves compared with the graph's type, for a matrix that a product reads."""
    if node.op != "get_attr":
        return 0.0
    weight = graph.weight(node)
    return prod(weight.shape) * node.meta["type"].dtype.itemsize - profile.streamed_bytes(weight)
