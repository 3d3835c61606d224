"""AWQ: activation-aware weight quantization (Lin et al. 2023, arXiv:2306.00978).

Salient channels, those with large inputs, are scaled up before rounding and their inputs scaled down by as much, which
is folded into the op that produces them (see fold.py); then group ranges are clipped if that lowers the error.
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
from .awq_gptq import GptqLoss
from .awq_search import Member, nearest_loss, search_clip, search_scales
from .fold import FoldGroup, apply_fold, factors, fold_group
from .inputs import LayerInputs, expert_rows, output_energy, summarize
from .select import EXPERT, LINEAR, QuantizePass, WeightJob, as_float, retype
from .store import PassStore
from .stream import Inputs, on, stream

_Found = dict[fx.Node, tuple[Tensor | None, dict[str, Any]]]
"""Per job: clips, and the facts for its record."""


@dataclass
class _SearchGroup:
    """Jobs that are searched together, and the result of the search."""

    fold: FoldGroup
    jobs: list[WeightJob]
    inputs: dict[fx.Node, LayerInputs] = field(default_factory=dict)
    scales: Tensor | None = None


@dataclass(frozen=True)
class QuantizeAwq(QuantizePass):
    """`sequences` are the calibration token ids. rounds=False folds scales without rounding weights that get calibrated
    codes: for tests, or with for_gptq because GPTQ rounds next; the scales are then chosen for GPTQ. searches=False
    reads and computes nothing: all scales are ones, so that only shapes are right."""

    name: ClassVar[str] = "quantize-awq"
    tolerance: ClassVar[float | None] = None

    sequences: Sequence[Sequence[int]] = field(default=(), repr=False)
    rounds: bool = True
    searches: bool = True
    for_gptq: bool = False

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

    def _search(self, graph: Graph, groups: list[_SearchGroup], ctx: PassContext) -> _Found:
        """Run the calibration text through the float model; search each group as soon as its inputs are known."""
        store = PassStore(ctx.calibrations / self.name if ctx.calibrations else None)
        numbers = {group.jobs[0].node: number for number, group in enumerate(groups)}
        found: _Found = {}
        waiting = [group for group in groups if not _restore(group, store, numbers[group.jobs[0].node], found)]
        where = {job.node: group for group in waiting for job in group.jobs}
        total = sum(prod(job.shape) for group in groups for job in group.jobs)
        done = total - sum(prod(job.shape) for group in waiting for job in group.jobs)

        def visit(node: fx.Node, inputs: Inputs) -> None:
            group = where[node]
            source: Any = node.args[0]
            twin = next((n for n in group.inputs if n.args[0] is source and n.target is LINEAR), None)
            with on(self.device):
                known = twin if node.target is not EXPERT else None
                group.inputs[node] = group.inputs[known] if known else summarize(expert_rows(node, inputs))
            if len(group.inputs) == len(group.jobs):
                nonlocal done
                ctx.progress(group.jobs[0].name, done, total)
                solved = self._solve(graph, group)
                group.inputs.clear()
                found.update(solved)
                _keep(group, store, numbers[group.jobs[0].node], solved)
                done += sum(prod(job.shape) for job in group.jobs)

        if where:
            stream(graph, self.sequences, list(where), visit, self.device, store)
        return found

    def _solve(self, graph: Graph, group: _SearchGroup) -> _Found:
        columns = {end.node: end.classes for end in group.fold.consumers}
        weights = [as_float(graph.weight(job.node.args[1])) for job in group.jobs]  # type: ignore[arg-type]
        with on(self.device):
            members: list[Member] = []
            for job, weight in zip(group.jobs, weights, strict=True):
                classes = columns.get(job.node)
                where = None if classes is None else classes.to(self.device)
                members.append(Member(weight.to(self.device), group.inputs[job.node], where, job.format))
            scales = self._scales(members, group.fold.count) if group.fold.count else None
            found = [self._choose(member, scales) for member in members]
        group.scales = None if scales is None else scales.cpu()
        return dict(zip((job.node for job in group.jobs), found, strict=True))

    def _scales(self, members: list[Member], count: int) -> Tensor | None:
        """The scales of layers that are scaled together; None if no scales are better than ones."""
        return search_scales(members, count, GptqLoss() if self.for_gptq else nearest_loss)

    def _choose(self, member: Member, scales: Tensor | None) -> tuple[Tensor | None, dict[str, Any]]:
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
        return clip.cpu(), {"output_snr_db": decibels(signal_energy, noise_energy), "scaled": scaled}


def _keep(group: _SearchGroup, store: PassStore, number: int, found: _Found) -> None:
    """Store the result of a group's search."""
    arrays = {f"clip{i}": clip for i, job in enumerate(group.jobs) if (clip := found[job.node][0]) is not None}
    if group.scales is not None:
        arrays["scales"] = group.scales
    facts = [found[job.node][1] for job in group.jobs]
    store.put(number, arrays, jobs=_identity(group), facts=facts)


def _restore(group: _SearchGroup, store: PassStore, number: int, found: _Found) -> bool:
    """Restore the result of an earlier run's search for a group; False if there is none."""
    kept = store.get(number, jobs=_identity(group))
    if kept is None:
        return False
    arrays, facts = kept
    group.scales = arrays.get("scales")
    for i, (job, known) in enumerate(zip(group.jobs, facts["facts"], strict=True)):
        found[job.node] = (arrays.get(f"clip{i}"), known)
    return True


def _identity(group: _SearchGroup) -> list[list[Any]]:
    """The properties of a group that must be equal for a stored result to be valid."""
    return [[job.name, job.format.name, list(job.shape)] for job in group.jobs]


def _ones(groups: list[_SearchGroup]) -> _Found:
    """Scales that change nothing."""
    for group in groups:
        if group.fold.count:
            group.scales = torch.ones(group.fold.count)
    return {}


def _groups(graph: Graph, jobs: list[WeightJob], ctx: PassContext) -> list[_SearchGroup]:
    """Fold groups of all jobs; jobs whose input cannot be scaled are grouped by the input they read."""
    blocked = {
        node: "its weight is shared by several layers" for job in jobs for node in job.nodes if len(job.nodes) > 1
    }
    by_node = {job.node: job for job in jobs}
    done: set[fx.Node] = set()
    groups: list[_SearchGroup] = []
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
        groups.append(_SearchGroup(fold, members))
    return groups
