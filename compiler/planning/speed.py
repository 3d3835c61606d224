"""How fast an engine can be at most on a target: each op at the limit of memory or of arithmetic (the roofline of
Williams, Waterman and Patterson 2009), whatever kernels reach of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ...runtime.format.footprint import kv_bytes_read
from ..graph.graph import LOGIT_ROWS, TOKENS
from ..ops import OPS
from ..report import node_cost
from ..targets import Target
from ..weights.handles import is_quantized
from .program import PlannedCompile

_PAGED = OPS["paged_attention"].overload


@dataclass(frozen=True)
class Rate:
    """One kind of step. sequences: how many are in it. length: tokens of context (decode) or of the prompt (prefill).

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


def rates(plan: PlannedCompile, target: Target, sequences: int, length: int) -> list[Rate]:
    """Decode of one sequence and of `sequences`, each with `length` tokens of context; and the prefill of a prompt."""
    batch = min(sequences, plan.limits.max_batch_size)
    chunk = min(plan.limits.max_step_tokens, length)
    found = [_rate(plan, target, "decode", count, length, count) for count in sorted({1, batch})]
    return [*found, _rate(plan, target, "prefill", 1, chunk, chunk)]


def _rate(plan: PlannedCompile, target: Target, kind: str, sequences: int, length: int, tokens: int) -> Rate:
    memory = arithmetic = 0.0
    rows = sequences if kind == "decode" else 1
    quantized = any(map(is_quantized, plan.graph.weights.values()))
    roof = target.roofline(eight=quantized and target.backend == "cpu")
    for node in plan.graph.nodes:
        cost = node_cost(plan.graph, node, {TOKENS: tokens, LOGIT_ROWS: rows}, plan.backend.profile)
        if cost is None:
            continue
        flops = cost.flops
        if node.target is _PAGED:  # its cost is that of all tokens of the step with each other
            flops *= length / tokens if kind == "decode" else 0.5
        by_memory, by_arithmetic = roof.memory_seconds(cost.bytes), roof.arithmetic_seconds(flops)
        memory += by_memory if by_memory >= by_arithmetic else 0.0
        arithmetic += by_arithmetic if by_arithmetic > by_memory else 0.0
    if kind == "decode":
        memory += roof.memory_seconds(sequences * kv_bytes_read(plan.program.kv, length))
    seconds = memory + arithmetic
    return Rate(kind, sequences, length, seconds, tokens / seconds, "memory" if memory >= arithmetic else "arithmetic")
