"""GPTQ: quantize column by column, later columns make up for the error (Frantar et al. 2022, arXiv:2210.17323)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from ...compiler.errors import UsageError
from ...compiler.graph.graph import Graph
from ...compiler.weights.formats.base import Parts, decibels
from ...compiler.weights.formats.grouped import GroupFormat
from ...compiler.weights.handles import PackedWeight, RoundedWeight
from ..base import PassContext, PassResult, Refusal
from .gptq_solver import Hessian, Solved, solve
from .inputs import expert_rows
from .select import EXPERT, Job, QuantizePass, as_float, retype
from .stream import Inputs, stream

MIN_EXPERT_TOKENS = 16


@dataclass(frozen=True)
class QuantizeGptq(QuantizePass):
    """`sequences` are the calibration token ids; each layer sees the outputs of the quantized layers before it.

    damping: added to the Hessian's diagonal, relative to its mean. act_order: columns with large inputs first; groups
    stay those of the original column order, so that the stored layout does not change.
    """

    name: ClassVar[str] = "quantize-gptq"
    tolerance: ClassVar[float | None] = None

    sequences: Sequence[Sequence[int]] = field(default=(), repr=False)
    damping: float = 0.01
    act_order: bool = True

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        jobs = self.jobs(graph, ctx)
        solved = {job.node: job for job in jobs if job.own}
        hessians: dict[fx.Node, Hessian] = {}
        done, total = 0, sum(map(_work, solved.values()))

        def visit(node: fx.Node, inputs: Inputs) -> None:
            job = solved[node]
            nonlocal done
            ctx.progress(job.name, done, total)
            self._quantize(graph, ctx, job, expert_rows(node, inputs), hessians)
            done += _work(job)

        if solved:
            stream(graph, self.sequences, solved.keys(), visit)
        for job in jobs:
            if job.node not in solved:
                source = graph.weight(job.node.args[1])  # type: ignore[arg-type]
                self.finish(graph, ctx, job, RoundedWeight(source, job.format))
        retype(graph)
        return PassResult(bool(jobs), Counter({"quantized": len(jobs)} if jobs else {}))

    def _quantize(
        self, graph: Graph, ctx: PassContext, job: Job, rows: list[Tensor], hessians: dict[fx.Node, Hessian]
    ) -> None:
        form = job.format
        if not isinstance(form, GroupFormat):
            raise UsageError(f"gptq cannot choose codes of {form.name}", "use awq: it rounds in any format")
        weight = as_float(graph.weight(job.node.args[1]))  # type: ignore[arg-type]
        planes = weight.reshape(-1, *weight.shape[-2:])
        results: list[Solved] = []
        for number, (plane, inputs) in enumerate(zip(planes, rows, strict=True)):
            if job.node.target is EXPERT and len(inputs) < MIN_EXPERT_TOKENS:
                reason = f"expert {number}: {len(inputs)} calibration tokens, rounded to nearest"
                ctx.refusals.append(Refusal("gptq", job.name, reason))
                hessian = Hessian.identity(plane.shape[-1])
            else:
                hessian = self._hessian(job.node, inputs, hessians)
            results.append(solve(plane, hessian, form))
        parts = _stack([r.parts for r in results], weight.shape)
        noise, signal = sum(r.noise for r in results), sum(r.signal for r in results)
        snr = decibels(float(weight.square().sum()), float((form.decode(parts) - weight).square().sum()))
        packed = PackedWeight.pack(parts, form, weight.shape, snr)
        self.finish(graph, ctx, job, packed, output_snr_db=decibels(signal, noise))

    def _hessian(self, node: fx.Node, rows: Tensor, known: dict[fx.Node, Hessian]) -> Hessian:
        """Linear layers that read one value share its Hessian; only the latest is kept."""
        source: Any = node.args[0]
        if node.target is EXPERT:
            return Hessian.of(rows, self.damping, self.act_order)
        if source not in known:
            known.clear()
            known[source] = Hessian.of(rows, self.damping, self.act_order)
        return known[source]


def _work(job: Job) -> int:
    """What choosing the codes of a weight [..., N, K] costs, in proportion: each column changes all later ones."""
    return prod(job.shape) * job.shape[-1]


def _stack(parts: list[Parts], shape: torch.Size) -> Parts:
    """The parts of a weight [..., N, K] from those of its planes [N, K]."""
    return {name: torch.stack([p[name] for p in parts]).reshape(*shape[:-1], -1) for name in parts[0]}
