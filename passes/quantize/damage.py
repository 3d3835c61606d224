"""What each format of each weight would cost the model's predictions, for `--quant auto`.

Two things are measured of every weight: what error each format would leave in its layer's outputs after GPTQ's feedback
(the errors of its columns over the diagonal of the inverse Hessian's Cholesky factor, which is what algorithm 1 of
Frantar et al. 2022 leaves, without running it), and how much the model's predictions suffer from an error there
(the KL divergence when that weight alone is rounded). Their product is the damage; allocation.py spends the bytes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import exp, log, prod
from typing import Any

import torch
from torch import Tensor, fx

from ...compiler.graph.graph import Graph
from ...compiler.graph.together import MODEL, Variant, run_together
from ...compiler.weights.formats.affine import GroupAffine
from ...compiler.weights.formats.base import StorageFormat
from ...compiler.weights.formats.blocks import BlockFormat
from ...compiler.weights.formats.fitting import encode_blocks
from ...compiler.weights.handles import RoundedWeight
from ..allocation import Curve, Option
from .gptq_solver import Hessian
from .inputs import expert_rows, gram
from .select import EMBEDDING, WeightJob, as_float
from .store import NOWHERE, PassStore
from .stream import Inputs, stream

Options = list[tuple[StorageFormat | None, int]]
"""The formats that a weight can have, each with its bytes in the engine; None is what it has."""
Progress = Callable[[str, int, int], None]
DAMPING = 0.01
_ROWS = 256  # of a matrix, that stand for all of them when formats are compared
_PROBED = 12_000  # tokens of all variants together, by which sensitivities are measured
_LEAST, _MOST = 12, 64  # of a sequence
PROBING = 0.2  # of the time that `measure` takes, about, sensitivities take


@dataclass
class _Measured:
    """What is known of a job: its options' output errors, that of the probe, and for a head that is a table too its
    Hessian and the matrix's own error, because a table's rows are read one by one."""

    options: Options
    errors: list[float] = field(default_factory=list)
    probe: float = 0.0
    plain_probe: float = 0.0
    gram: Tensor | None = None

    def keep(self, store: PassStore, number: int, name: str) -> None:
        """Leave what was measured for a run that goes on behind this one."""
        arrays = {} if self.gram is None else {"gram": self.gram}
        facts = {"errors": self.errors, "probe": self.probe, "plain_probe": self.plain_probe}
        store.put(number, arrays, **self._identity(name), **facts)

    def restored(self, store: PassStore, number: int, name: str) -> bool:
        """Whether an earlier run has measured this; then it is that."""
        kept = store.get(number, **self._identity(name))
        if kept is not None:
            arrays, facts = kept
            self.errors, self.probe, self.plain_probe = facts["errors"], facts["probe"], facts["plain_probe"]
            self.gram = arrays.get("gram")
        return kept is not None

    def _identity(self, name: str) -> dict[str, Any]:
        return {"name": name, "options": [form and form.name for form, _ in self.options]}


@dataclass(frozen=True)
class Damages:
    """For each job, in order: what its formats cost, and how much an error of a table that it also is counts beside one
    of an output (0 where it is none)."""

    curves: tuple[Curve, ...]
    shares: tuple[float, ...]


def measure(
    graph: Graph,
    jobs: list[WeightJob],
    options: Sequence[Options],
    sequences: Sequence[Sequence[int]],
    progress: Progress,
    store: PassStore = NOWHERE,
) -> Damages:
    """By what the float model does with `sequences`, token ids for calibration. store: what an interrupted run has
    measured."""
    found = {job.node: _Measured(of) for job, of in zip(jobs, options, strict=True)}
    _measure_errors(graph, jobs, found, sequences, part(progress, 0.0, 1 - PROBING), store)
    sensitivities, shares = _sensitivities(graph, jobs, found, sequences, part(progress, 1 - PROBING, 1.0), store)
    curves = [_curve(graph, job, found[job.node], sensitivities[job.node], shares) for job in jobs]
    return Damages(tuple(curves), tuple(shares.get(job.node, 0.0) for job in jobs))


def part(progress: Progress, start: float, end: float) -> Progress:
    """For a part of some work, from `start` to `end` of it (0 to 1), that counts what it has done by itself."""

    def heard(text: str, done: int, total: int) -> None:
        progress(text, round(1_000_000 * (start + (end - start) * done / max(total, 1))), 1_000_000)

    return heard


def guess(jobs: list[WeightJob], options: Sequence[Options]) -> Damages:
    """Damages that take all weights to be equally sensitive, for a plan without weights: they fall to a quarter per
    bit."""
    curves = []
    for job, found in zip(jobs, options, strict=True):
        size = prod(job.shape)
        damages = [0.0 if form is None else size * 4.0 ** (-8 * nbytes / size) for form, nbytes in found]
        curves.append(Curve(job.name, tuple(Option.of(*of, d) for of, d in zip(found, damages, strict=True)), 1.0))
    return Damages(tuple(curves), (0.0,) * len(jobs))


def _measure_errors(
    graph: Graph,
    jobs: list[WeightJob],
    measured: dict[fx.Node, _Measured],
    sequences: Sequence[Sequence[int]],
    progress: Progress,
    store: PassStore,
) -> None:
    """Errors of every option, by the inputs that the float model gives to each layer."""
    linear = {job.node: number for number, job in enumerate(jobs) if job.node.target is not EMBEDDING}
    total = sum(prod(jobs[number].shape) for number in linear.values())
    waiting = [node for node, number in linear.items() if not measured[node].restored(store, number, jobs[number].name)]
    done = total - sum(prod(jobs[linear[node]].shape) for node in waiting)

    def visit(node: fx.Node, inputs: Inputs) -> None:
        nonlocal done
        job, found = jobs[linear[node]], measured[node]
        progress(f"measuring {job.name}", done, total)
        grams = grams_of(node, inputs)
        weight = as_float(graph.weight(node.args[1]))  # type: ignore[arg-type]
        noise = _probe(job.shape[-1]).rounded(weight) - weight
        planes = noise.reshape(-1, *noise.shape[-2:])
        found.probe = sum(_energy(p, g) for p, g in zip(planes, grams, strict=True))
        found.plain_probe = float(noise.square().sum(dtype=torch.float64))
        if job.tables:
            found.gram = grams[0]  # its errors depend on how much tables suffer, which is not known yet
        else:
            found.errors = _errors(weight, grams, found.options)
        found.keep(store, linear[node], job.name)
        done += prod(job.shape)

    if waiting:
        stream(graph, sequences, waiting, visit, store=store)
    for job in jobs:
        if job.node not in linear:
            weight, found = as_float(graph.weight(job.node.args[1])), measured[job.node]  # type: ignore[arg-type]
            noise = _probe(job.shape[-1]).rounded(weight) - weight
            found.probe = float(noise.square().sum(dtype=torch.float64))
            found.errors = _errors(weight, [torch.eye(job.shape[-1])], found.options)


def _sensitivities(
    graph: Graph,
    jobs: list[WeightJob],
    measured: dict[fx.Node, _Measured],
    sequences: Sequence[Sequence[int]],
    progress: Progress,
    store: PassStore,
) -> tuple[dict[fx.Node, float], dict[fx.Node, float]]:
    """KL divergence per unit of output error of every job; and, for heads that are tables too, how much an error of
    a table counts beside one of an output."""
    sites = [(job, job.nodes) for job in jobs] + [(job, job.tables) for job in jobs if job.tables]
    variants: list[Variant] = []
    for job, nodes in sites:
        weight = graph.weight(job.node.args[1])  # type: ignore[arg-type]
        variants.append(dict.fromkeys(nodes, RoundedWeight(weight, _probe(job.shape[-1]))))
    tokens = min(max(_PROBED // (2 * max(1, len(variants))), _LEAST), _MOST)
    ids = [list(sequence[:tokens]) for sequence in spread(sequences, 2)]
    kept = store.get(len(jobs), sites=[job.name for job, _ in sites])
    if kept is None:
        costs = divergences(graph, ids, variants, partial(progress, "measuring what errors do to predictions"))
        store.put(len(jobs), {}, sites=[job.name for job, _ in sites], divergences=costs)
    else:
        costs = kept[1]["divergences"]
    own = costs[: len(jobs)]
    raw = {job.node: max(kl, 1e-12) / max(measured[job.node].probe, 1e-30) for job, kl in zip(jobs, own, strict=True)}
    tables = {job.node: kl for (job, _), kl in zip(sites[len(jobs) :], costs[len(jobs) :], strict=True)}
    shares = {node: max(kl, 1e-12) / max(measured[node].plain_probe, 1e-30) / raw[node] for node, kl in tables.items()}
    return _smoothed(jobs, raw), shares


def _curve(graph: Graph, job: WeightJob, found: _Measured, sensitivity: float, shares: dict[fx.Node, float]) -> Curve:
    if found.gram is not None:
        weight = as_float(graph.weight(job.node.args[1]))  # type: ignore[arg-type]
        found.errors = _errors(weight, [with_table(found.gram, shares[job.node])], found.options)
        found.gram = None
    options = [
        Option.of(form, nbytes, sensitivity * error)
        for (form, nbytes), error in zip(found.options, found.errors, strict=True)
    ]
    return Curve(job.name, tuple(options), sensitivity)


def _probe(k: int) -> GroupAffine:
    """A coarse format that is quick to round to."""
    return GroupAffine(128, 4).fitted(k)


def grams_of(node: fx.Node, inputs: Inputs) -> list[Tensor]:
    """The second moments of what each expert reads (of a linear layer, one), over all tokens: [K, K] each."""
    found = expert_rows(node, inputs)
    source = inputs[node.args[0]]  # type: ignore[index]
    total = max(1, sum(len(value) for value in source))
    return [gram(rows) / total for rows in found]


def _energy(noise: Tensor, moments: Tensor) -> float:
    """The mean energy of outputs noise x per token."""
    return float(((noise @ moments) * noise).sum(dtype=torch.float64))


def with_table(moments: Tensor, share: float) -> Tensor:
    """The Hessian of a matrix that is a table too: errors of its own count as `share` of those of outputs."""
    return moments + share * torch.eye(len(moments)) if share else moments


def importance_of(hessian: Hessian) -> Tensor:
    """What the squared error of each column [K] leaves behind GPTQ's feedback."""
    cost = torch.empty(len(hessian.order))
    cost[hessian.order] = hessian.factor.diagonal().square().reciprocal()
    return cost


def _errors(
    weight: Tensor, grams: Sequence[Tensor], options: Sequence[tuple[StorageFormat | None, int]]
) -> list[float]:
    """The output error that each format leaves: of some rows, for all."""
    planes = weight.reshape(-1, *weight.shape[-2:])
    errors = [0.0] * len(options)
    count = planes.shape[1]
    step = max(1, count // _ROWS)
    for plane, moments in zip(planes, grams, strict=True):
        if not moments.any():
            continue
        importance, rows = importance_of(Hessian.from_gram(moments, DAMPING, act_order=True)), plane[::step]
        for i, (form, _) in enumerate(options):
            if isinstance(form, BlockFormat):
                noise = form.decode(encode_blocks(form, rows, importance)) - rows
                errors[i] += float((noise.square() * importance).sum(dtype=torch.float64)) * count / len(rows)
    return errors


def spread(sequences: Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    """Some of the sequences, from all over."""
    step = max(1, len(sequences) // count)
    return list(sequences[::step][:count])


def divergences(
    graph: Graph, sequences: list[list[int]], variants: list[Variant], heard: Callable[[int, int], None]
) -> list[float]:
    """The mean KL divergence per token of each variant from the model."""
    found = [0.0] * len(variants)
    model = torch.empty(0)
    count = sum(map(len, sequences))
    for answer in run_together(graph, sequences, variants, heard):
        logs = torch.log_softmax(answer.logits, -1)
        if answer.variant == MODEL:
            model = logs
        else:
            found[answer.variant] += float((model.exp() * (model - logs)).sum(dtype=torch.float64)) / max(count, 1)
    return found


def _smoothed(jobs: Sequence[WeightJob], raw: dict[fx.Node, float]) -> dict[fx.Node, float]:
    """Few tokens were seen: each is the geometric mean of itself and of its neighbours in other layers."""
    alike: defaultdict[str, list[fx.Node]] = defaultdict(list)
    for job in jobs:
        alike[re.sub(r"\d+", "#", job.name)].append(job.node)
    found: dict[fx.Node, float] = {}
    for nodes in alike.values():
        for i, node in enumerate(nodes):
            near = nodes[max(0, i - 1) : i + 2]
            found[node] = exp(sum(log(raw[other]) for other in near) / len(near))
    return found
