"""Round to nearest: every group of weights gets the scale and zero point that span its range."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from ...compiler.graph.graph import Graph
from ...compiler.weights.handles import RoundedWeight
from ..base import PassContext, PassResult
from .select import QuantizePass, retype


@dataclass(frozen=True)
class QuantizeRtn(QuantizePass):
    """Needs no calibration. Lazy: nothing is read or computed until the weight is packed."""

    name: ClassVar[str] = "quantize-rtn"
    tolerance: ClassVar[float | None] = None

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        jobs = self.jobs(graph, ctx)
        for job in jobs:
            source = graph.weight(job.node.args[1])  # type: ignore[arg-type]
            self.finish(graph, ctx, job, RoundedWeight(source, job.format))
        retype(graph)
        return PassResult(bool(jobs), Counter({"quantized": len(jobs)} if jobs else {}))
