"""AWQ: activation-aware weight quantization (Lin et al. 2023, arXiv:2306.00978).

Salient channels, those with large inputs, are scaled up before rounding and their inputs scaled down by as much, which
is folded into whatever produces them (see fold.py); then group ranges are clipped where that lowers the error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from ...compiler.graph.graph import Graph
from ...compiler.weights.formats.base import decibels
from ...compiler.weights.handles import RoundedWeight
from ..base import PassContext, PassResult, Refusal
from .awq_search import Member, search_clip, search_scales
from .fold import FoldGroup, apply_fold, factors, fold_group
from .inputs import LayerInputs, expert_rows, output_energy, summarize
from .select import EXPERT, LINEAR, Job, QuantizePass, as_float, retype
from .stream import Inputs, stream


@dataclass
class _Group:
    """Jobs that are searched together, and what the search found."""

    fold: FoldGroup
    jobs: list[Job]
    inputs: dict[fx.Node, LayerInputs] = field(default_factory=dict)
    scales: Tensor | None = None


@dataclass(frozen=True)
class QuantizeAwq(QuantizePass):
    """`sequences` are the calibration token ids. rounds=False folds scales without rounding anything (for tests).
    searches=False reads and computes nothing: wherever there may be scales there are ones, so that shapes are right."""

    name: ClassVar[str] = "quantize-awq"
    tolerance: ClassVar[float | None] = None

    sequences: Sequence[Sequence[int]] = field(default=(), repr=False)
    rounds: bool = True
    searches: bool = True

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        jobs = self.jobs(graph, ctx)
        searched = [job for job in jobs if job.own]
        groups = _groups(graph, searched, ctx)
        found = self._search(graph, groups, ctx) if self.searches else _ones(groups)
        counts: Counter[str] = Counter()
        for group in groups:
            if group.scales is not None:
                apply_fold(graph, group.fold, group.scales)
                counts["folded"] += 1
        for job in jobs:
            if job.own and not self.rounds:
                continue
            source = graph.weight(job.node.args[1])  # type: ignore[arg-type]
            clip, facts = found.get(job.node, (None, {}))
            self.finish(graph, ctx, job, RoundedWeight(source, job.format, clip), **facts)
            counts["quantized"] += 1
        retype(graph)
        return PassResult(bool(jobs), counts)

    def _search(
        self, graph: Graph, groups: list[_Group], ctx: PassContext
    ) -> dict[fx.Node, tuple[Tensor | None, dict[str, Any]]]:
        """Run the calibration text through the float model; search each group as soon as its inputs are there."""
        where = {job.node: (group, job) for group in groups for job in group.jobs}
        found: dict[fx.Node, tuple[Tensor | None, dict[str, Any]]] = {}
        done, total = 0, sum(prod(job.shape) for _, job in where.values())

        def visit(node: fx.Node, inputs: Inputs) -> None:
            group, _ = where[node]
            source: Any = node.args[0]
            if node.target is EXPERT:
                group.inputs[node] = summarize(expert_rows(node, inputs))
            else:
                twin = next((n for n in group.inputs if n.args[0] is source and n.target is LINEAR), None)
                group.inputs[node] = group.inputs[twin] if twin else summarize(expert_rows(node, inputs))
            if len(group.inputs) == len(group.jobs):
                nonlocal done
                ctx.progress(group.jobs[0].name, done, total)
                found.update(self._solve(graph, group))
                group.inputs.clear()
                done += sum(prod(job.shape) for job in group.jobs)

        if where:
            stream(graph, self.sequences, where.keys(), visit)
        return found

    def _solve(self, graph: Graph, group: _Group) -> dict[fx.Node, tuple[Tensor | None, dict[str, Any]]]:
        columns = {end.node: end.classes for end in group.fold.consumers}
        members: list[Member] = []
        for job in group.jobs:
            weight = as_float(graph.weight(job.node.args[1]))  # type: ignore[arg-type]
            classes = columns.get(job.node)
            members.append(Member(weight, group.inputs[job.node], classes, job.format))
        if group.fold.count:
            group.scales = search_scales(members, group.fold.count)
        return {job.node: self._clip(member, group.scales) for job, member in zip(group.jobs, members, strict=True)}

    def _clip(self, member: Member, scales: Tensor | None) -> tuple[Tensor | None, dict[str, Any]]:
        if not self.rounds:
            return None, {}
        scaled = scales is not None and member.classes is not None
        factor = factors(scales, member.classes) if scaled else None  # type: ignore[arg-type]
        weight, rows = member.weight, member.inputs.rows
        if factor is not None:
            weight, rows = weight * factor, tuple(r / factor for r in rows)
        clip = search_clip(weight, rows, member.format)
        rounded = member.format.rounded(weight, clip)
        planes = weight.reshape(-1, *weight.shape[-2:])
        noise = (rounded - weight).reshape(planes.shape)
        signal_energy = sum(output_energy(w, r) for w, r in zip(planes, rows, strict=True))
        noise_energy = sum(output_energy(w, r) for w, r in zip(noise, rows, strict=True))
        return clip, {"output_snr_db": decibels(signal_energy, noise_energy), "scaled": scaled}


def _ones(groups: list[_Group]) -> dict[fx.Node, tuple[Tensor | None, dict[str, Any]]]:
    """Scales that change nothing."""
    for group in groups:
        if group.fold.count:
            group.scales = torch.ones(group.fold.count)
    return {}


def _groups(graph: Graph, jobs: list[Job], ctx: PassContext) -> list[_Group]:
    """Fold groups of all jobs; jobs whose input cannot be scaled are grouped by the input they read."""
    blocked = {
        node: "its weight is shared by several layers" for job in jobs for node in job.nodes if len(job.nodes) > 1
    }
    by_node = {job.node: job for job in jobs}
    done: set[fx.Node] = set()
    groups: list[_Group] = []
    for job in jobs:
        if job.node in done:
            continue
        fold = fold_group(graph, job.node, blocked)
        members = [by_node[end.node] for end in fold.consumers if end.node in by_node and end.node not in done]
        if job not in members:
            members = [job]
            reason = fold.reason or "its input is tied to channels that cannot be scaled"
            ctx.refusals.append(Refusal("awq-scale", job.name, reason))
            fold = FoldGroup((), (), 0, reason)
        done.update(member.node for member in members)
        groups.append(_Group(fold, members))
    return groups
