"""Computes the speed that an engine on a target cannot exceed: each op runs at the limit of memory or of arithmetic
(the roofline of Williams, Waterman and Patterson 2009)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from math import log, prod, sqrt

from torch import fx

from ...runtime.format.footprint import kv_bytes_read
from ..graph.graph import Graph
from ..graph.tensor_types import LOGIT_ROWS, TOKENS, type_of
from ..links import divided_seconds, read_seconds, sum_seconds
from ..ops import OPS, named_arguments, traits_of
from ..program.storage import narrow_values
from ..report import node_cost
from ..targets import Target
from ..weights.handles import Weight, is_quantized, pieces_of
from ..weights.shards import Shard
from .program import PlannedCompile

_PAGED, _EXPERTS, _SUM, _TRANSFER, _SCATTER, _GATHER = (
    OPS[name].overload
    for name in ("paged_attention", "expert_linear", "all_reduce", "transfer", "reduce_scatter", "all_gather_rows")
)


@dataclass(frozen=True)
class Rate:
    """The rate of one kind of step. sequences: their number in the step. length: tokens of context (decode) or of the
    prompt (prefill).

    seconds: the least time of the step. bound: "memory" or "arithmetic", whichever takes the larger part of it.
    """

    kind: str
    sequences: int
    length: int
    seconds: float
    tokens_per_s: float
    bound: str

    def as_json(self) -> dict[str, object]:
        """The fields by name."""
        return asdict(self)


@dataclass(frozen=True)
class StepTime:
    """The least time of a step, in seconds, split into ops that are limited by memory, ops that are limited by
    arithmetic, and links between ranks. link_bytes: bytes that a rank reads from others."""

    memory: float = 0.0
    arithmetic: float = 0.0
    link: float = 0.0
    link_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum: the parts do not overlap."""
        return self.memory + self.arithmetic + self.link

    def __add__(self, other: StepTime) -> StepTime:
        return StepTime(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def rates(plan: PlannedCompile, target: Target, sequences: int, length: int) -> list[Rate]:
    """The rates of decode with one and with `sequences` sequences, each with `length` tokens of context; and of the
    prefill of a prompt."""
    batch = min(sequences, plan.limits.max_batch_size)
    chunk = min(plan.limits.max_step_tokens, length)
    decodes = [_rate("decode", count, length, decode_time(plan, target, count, length)) for count in sorted({1, batch})]
    return [*decodes, _rate("prefill", 1, chunk, prefill_time(plan, target, chunk), chunk)]


def _rate(kind: str, sequences: int, length: int, time: StepTime, tokens: int | None = None) -> Rate:
    bound = "memory" if time.memory >= time.arithmetic else "arithmetic"
    return Rate(kind, sequences, length, time.seconds, (tokens or sequences) / time.seconds, bound)


def decode_time(plan: PlannedCompile, target: Target, sequences: int, length: int) -> StepTime:
    """The time of a step with the next token of `sequences`, each with `length` tokens of context, on one rank; if
    ranks are stages, on all of them."""
    time = _calls_time(plan, target, sequences, sequences, length / sequences)
    cache = target.roofline().memory_seconds(sequences * kv_bytes_read(plan.program.kv, length))
    return time + StepTime(memory=cache)


def prefill_time(plan: PlannedCompile, target: Target, tokens: int) -> StepTime:
    """The time of a step with `tokens` tokens of one prompt, on one rank."""
    return _calls_time(plan, target, tokens, 1, 0.5)


def _calls_time(plan: PlannedCompile, target: Target, tokens: int, rows: int, attended: float) -> StepTime:
    """The time of all calls of the graph. rows: number of rows of logits. attended: the keys that each token reads, as
    a multiple of the step's tokens."""
    graph, time = plan.graph, StepTime()
    quantized = any(map(_has_codes, graph.weights.values()))
    roof = target.roofline(eight=quantized and target.backend == "cpu")
    counts = {TOKENS: tokens, LOGIT_ROWS: rows}
    narrow = narrow_values(graph) if plan.backend.profile.activation != "f32" else ()
    for node in graph.nodes:
        if node.op == "call_function" and traits_of(node.target).collective:
            time += _exchange_time(node, counts, graph.ranks, target, (node.args[0], 0) in narrow)
            continue
        cost = node_cost(graph, node, counts, plan.backend.profile)
        if cost is None:
            continue
        of_bytes, of_flops = _fullest(graph, node, tokens)
        if node.target is _PAGED:  # its cost assumes that all tokens of the step attend to each other
            of_flops = attended
        by_memory, by_arithmetic = (
            roof.memory_seconds(cost.bytes * of_bytes),
            roof.arithmetic_seconds(cost.flops * of_flops),
        )
        time += StepTime(by_memory) if by_memory >= by_arithmetic else StepTime(arithmetic=by_arithmetic)
    return time


def _exchange_time(
    node: fx.Node, counts: Mapping[str, int], ranks: int, target: Target, narrow: bool = False
) -> StepTime:
    """The time of a collective op: each rank reads the others' values, or its share of them if rows are divided.
    narrow: whether elements have 16 bits."""
    given = node.args[0]
    assert isinstance(given, fx.Node)
    kind = type_of(given)
    rows = 1 if kind.rows is None else counts[kind.rows]
    nbytes = (2 if narrow else kind.dtype.itemsize) * prod(kind.shape) * rows
    decodes = counts[TOKENS] == counts[LOGIT_ROWS] and target.backend != "cpu"  # GPUs divide no rows in decode
    if node.target in (_SCATTER, _GATHER) and rows >= node.args[1] and not decodes:  # type: ignore[operator]
        return StepTime(link=divided_seconds(nbytes, ranks, target), link_bytes=nbytes * (ranks - 1) / ranks)
    if node.target is _GATHER:  # every rank has all rows already
        return StepTime()
    if node.target is _TRANSFER:
        return StepTime(link=read_seconds(nbytes, target), link_bytes=nbytes)
    read, whole = float(nbytes * (ranks - 1)), node.target in (_SUM, _SCATTER)
    seconds = sum_seconds(nbytes, ranks, target) if whole else divided_seconds(nbytes * ranks, ranks, target)
    return StepTime(link=seconds, link_bytes=read)


def _fullest(graph: Graph, node: fx.Node, tokens: int) -> tuple[float, float]:
    """The shares of the bytes and the FLOPs of an expert product on the rank with the most tokens, if ranks have whole
    experts; (1, 1) for other calls.

    Choices of experts are assumed to be uniform: with m per rank on average, the fullest rank has about m + sqrt(2 m ln
    ranks) (Raab and Steger 1998, "Balls into Bins").
    """
    if node.target is not _EXPERTS or graph.ranks == 1:
        return 1.0, 1.0
    named = named_arguments(node)
    weight, index = graph.weight(named["weight"]), named["index"]
    if index is None or not all(isinstance(piece, Shard) and piece.axis == 0 for piece in pieces_of(weight)):
        return 1.0, 1.0
    choices, experts = tokens * prod(type_of(index).shape), weight.shape[0]
    even = choices / graph.ranks
    fullest = min(choices, even + sqrt(2 * even * log(graph.ranks)))
    return min(fullest, experts) / min(choices, experts), fullest / choices


def _has_codes(weight: Weight) -> bool:
    return any(is_quantized(piece.source if isinstance(piece, Shard) else piece) for piece in pieces_of(weight))
