"""GPTQ: quantizes column by column; later columns compensate for the error (Frantar et al. 2022, arXiv:2210.17323)."""

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
from .select import EXPERT, QuantizePass, WeightJob, as_float, retype
from .store import PassStore
from .stream import Inputs, on, stream

MIN_EXPERT_TOKENS = 16


@dataclass(frozen=True)
class QuantizeGptq(QuantizePass):
    """`sequences` are the calibration token ids; each layer sees the outputs of the quantized layers before it.

    damping: value added to the Hessian's diagonal, relative to its mean. act_order: quantize columns with large inputs
    first; groups are those of the original column order, so that the stored layout does not change. sweeps: how often
    codes and scales are chosen again afterwards, see descent.py.
    """

    name: ClassVar[str] = "quantize-gptq"
    tolerance: ClassVar[float | None] = None

    sequences: Sequence[Sequence[int]] = field(default=(), repr=False)
    damping: float = 0.01
    act_order: bool = True
    sweeps: int = 0

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        jobs = self.jobs(graph, ctx)
        if any(job.own for job in jobs):
            _Calibration(self, graph, ctx, {job.node: job for job in jobs if job.own}).run()
        for job in jobs:
            if not job.own:
                source = graph.weight(job.node.args[1])  # type: ignore[arg-type]
                self.finish(graph, ctx, job, RoundedWeight(source, job.format))
        retype(graph)
        return PassResult(bool(jobs), Counter({"quantized": len(jobs)} if jobs else {}))


@dataclass
class _Calibration:
    """One run of the text through the model: `jobs` by node, each solved when the run reaches it."""

    options: QuantizeGptq
    graph: Graph
    ctx: PassContext
    jobs: dict[fx.Node, WeightJob]

    def __post_init__(self) -> None:
        folder = self.ctx.calibrations
        self._store = PassStore(folder / self.options.name if folder else None)
        self._numbers = {node: number for number, node in enumerate(self.jobs)}
        self._tokens = sum(map(len, self.options.sequences))
        self._total = sum(self._cost(job) for job in self.jobs.values())

    def run(self) -> None:
        """Solve all jobs, or restore the results of an earlier run."""
        self._waiting = {node: job for node, job in self.jobs.items() if not self._restore(job)}
        if self._waiting:
            device = self.options.device
            stream(self.graph, self.options.sequences, list(self._waiting), self._visit, device, self._store)

    def _visit(self, node: fx.Node, inputs: Inputs) -> None:
        if node not in self._waiting:  # already solved together with another
            return
        jobs = _together(self._waiting, node)
        done = self._total - sum(self._cost(job) for job in self._waiting.values())
        self.ctx.progress(jobs[0].name, done, self._total)
        self._solve(jobs, expert_rows(node, inputs))
        for job in jobs:
            del self._waiting[job.node]

    def _solve(self, jobs: list[WeightJob], rows: list[list[Tensor]]) -> None:
        """Choose the codes of weights that read one value and have one format."""
        form, device = jobs[0].format, self.options.device
        if not isinstance(form, GroupFormat):
            raise UsageError(f"gptq cannot choose codes of {form.name}", "use awq: it rounds in any format")
        weights = [as_float(self.graph.weight(job.node.args[1])) for job in jobs]  # type: ignore[arg-type]
        planes = torch.cat([weight.reshape(len(rows), -1, weight.shape[-1]) for weight in weights], 1)
        results: list[list[Solved]] = [[] for _ in jobs]
        few: list[Refusal] = []
        for number, inputs in enumerate(rows):
            with on(device):
                hessian = self._hessian(jobs[0], number, inputs, few)
                whole = solve(planes[number].to(device), hessian, form, self.options.sweeps, self.options.damping)
            for found, piece in zip(results, whole.split([weight.shape[-2] for weight in weights]), strict=True):
                found.append(piece)
        for job, weight, found in zip(jobs, weights, results, strict=True):
            parts = _stack([r.parts for r in found], weight.shape)
            snr = decibels(float(weight.square().sum()), float((form.decode(parts) - weight).square().sum()))
            packed = PackedWeight.pack(parts, form, weight.shape, snr)
            output_snr = decibels(sum(r.signal for r in found), sum(r.noise for r in found))
            facts = {"snr": snr, "output_snr": output_snr, "few": [refusal.reason for refusal in few]}
            self._store.put(self._numbers[job.node], packed.held, **_identity(job), **facts)
            self._finish(job, packed, facts)

    def _hessian(self, job: WeightJob, expert: int, rows: list[Tensor], few: list[Refusal]) -> Hessian:
        count = sum(map(len, rows))
        if job.node.target is EXPERT and count < MIN_EXPERT_TOKENS:
            few.append(Refusal("gptq", job.name, f"expert {expert}: {count} calibration tokens, rounded to nearest"))
            return Hessian.identity(rows[0].shape[-1])
        return Hessian.of(rows, self.options.damping, self.options.act_order)

    def _restore(self, job: WeightJob) -> bool:
        """Restore the weight of a job that an earlier run has solved; False if none has."""
        found = self._store.get(self._numbers[job.node], **_identity(job))
        if found is None:
            return False
        held, facts = found
        self._finish(job, PackedWeight(held, job.format, job.shape, facts["snr"]), facts)
        return True

    def _finish(self, job: WeightJob, weight: PackedWeight, facts: dict[str, Any]) -> None:
        self.ctx.refusals += [Refusal("gptq", job.name, reason) for reason in facts["few"]]
        self.options.finish(self.graph, self.ctx, job, weight, output_snr_db=facts["output_snr"])

    def _cost(self, job: WeightJob) -> int:
        """Operations: the product of the forward pass, and each column of the weight [..., N, K] changes later ones."""
        return prod(job.shape) * (2 * self._tokens + job.shape[-1])


def _identity(job: WeightJob) -> dict[str, Any]:
    """The properties of a job that must be equal for a stored result to be valid."""
    return {"name": job.name, "format": job.format.name, "shape": list(job.shape)}


def _together(waiting: dict[fx.Node, WeightJob], node: fx.Node) -> list[WeightJob]:
    """The job of `node`, and those of linear layers that read the same value and have the same format: they share a
    Hessian."""
    first = waiting[node]
    if node.target is EXPERT:
        return [first]
    return [
        job
        for other, job in waiting.items()
        if other.args[0] is node.args[0] and other.target is node.target and job.format == first.format
    ]


def _stack(parts: list[Parts], shape: torch.Size) -> Parts:
    """The parts of a weight [..., N, K] from those of its planes [N, K]."""
    return {name: torch.stack([p[name].cpu() for p in parts]).reshape(*shape[:-1], -1) for name in parts[0]}
