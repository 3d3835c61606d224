"""Measures the damage of each format of each weight to the model's predictions, for `--quant auto`.

It uses the second derivative of the KL divergence: an error N of a weight whose inputs are x and whose outputs have the
gradients g costs tr(G N H N^T) / 2, with G = E[g g^T], the Fisher information of the outputs, and H the second moments
of x (K-FAC, Martens and Grosse 2015, arXiv:1503.05671). G is assumed to be diagonal. One backward pass gives both. The
error of a format is an estimate of the error after GPTQ's feedback, without running GPTQ: the errors of its columns
over the diagonal of the inverse Hessian's Cholesky factor (algorithm 1 of Frantar et al. 2022). allocation.py then
allocates the bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from ...compiler.graph.graph import Graph
from ...compiler.graph.together import MODEL, Variant, run_together
from ...compiler.weights.formats.base import StorageFormat
from ...compiler.weights.formats.blocks import BlockFormat
from ...compiler.weights.formats.fitting import encode_blocks
from ..allocation import Curve, Option
from .backward import Values, backward
from .gptq_solver import Hessian
from .inputs import expert_rows, gram
from .select import EMBEDDING, WeightJob, as_float
from .store import NOWHERE, PassStore
from .stream import Inputs, needed

Options = list[tuple[StorageFormat | None, int]]
"""The formats that a weight can have, each with its bytes in the engine; None stands for its current form."""
Progress = Callable[[str, int, int], None]
DAMPING = 0.01
TOKENS = 2048  # tokens of the calibration text with which damages are measured
_ROWS = 128  # rows of a matrix that are sampled when formats are compared
_SURE = 0.1  # least share of the residuals' degrees of freedom that is assumed if tokens are fewer than columns
_LEAST = 1e-15  # the damage of weights that the predictions do not depend on


@dataclass(frozen=True)
class Damages:
    """For each job, in order: the damage of its formats, and the weight of an error of its embedding rows relative to
    one of its outputs (0 if the matrix is not also an embedding)."""

    curves: tuple[Curve, ...]
    shares: tuple[float, ...]


@dataclass
class Moments:
    """The result of a backward pass for a weight: for each expert (one for a linear layer) the second moments of its
    inputs [K, K], the number of inputs, and the energy of each output's gradients [N]; for an embedding only the energy
    of gradients. All are sums over tokens."""

    grams: list[Tensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    table: float = 0.0

    def add(self, node: fx.Node, values: Values, gradient: Tensor) -> None:
        """Add the moments of one node and sequence. gradient: of the node's result, in its shape."""
        if node.target is EMBEDDING:
            self.table += float(gradient.square().sum(dtype=torch.float64))
            return
        inputs: Inputs = {arg: [values[arg]] for arg in node.all_input_nodes if arg in values}
        source: Any = node.args[0]
        pairs = zip(expert_rows(node, inputs), expert_rows(node, {**inputs, source: [gradient]}), strict=True)
        for number, ([x], [g]) in enumerate(pairs):
            found, energy = gram([x]), g.square().sum(0)
            if number == len(self.grams):
                self.grams.append(found)
                self.counts.append(len(x))
                self.rows.append(energy)
            else:
                self.grams[number] += found
                self.counts[number] += len(x)
                self.rows[number] += energy


def measure(
    graph: Graph,
    jobs: list[WeightJob],
    options: Sequence[Options],
    sequences: Sequence[Sequence[int]],
    progress: Progress,
    store: PassStore = NOWHERE,
) -> Damages:
    """Damages measured by running the float model on some of `sequences`, token ids for calibration. store: the results
    of an interrupted run."""
    text = spread(sequences, -(-TOKENS // max(map(len, sequences))))
    run = _Run(graph, jobs, options, sum(map(len, text)), progress, store)
    run.restore()
    if len(run.found) < len(jobs):
        backward(graph, text, list(run.numbers), run.visit, run.left, run.heard)
    found = [run.found.get(number) or (_unseen(job, own), 0.0) for number, (job, own) in run.every()]
    curves = [
        Curve(job.name, tuple(Option.of(*option, damage) for option, damage in zip(own, damages, strict=True)))
        for job, own, (damages, _) in zip(jobs, options, found, strict=True)
    ]
    return Damages(tuple(curves), tuple(share for _, share in found))


@dataclass
class _Run:
    """One backward pass. found: by the number of a job, the damage of each option, and the share of a table. numbers:
    the job's number of each weight node that the predictions depend on."""

    graph: Graph
    jobs: list[WeightJob]
    options: Sequence[Options]
    tokens: int
    progress: Progress
    store: PassStore
    found: dict[int, tuple[list[float], float]] = field(default_factory=dict)
    done: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        reached = set(needed(self.graph, [self.graph.output]))
        nodes = [(node, i) for i, job in enumerate(self.jobs) for node in (*job.nodes, *job.tables) if node in reached]
        self.numbers = dict(nodes)
        self.waiting = Counter(self.numbers.values())
        self.moments: defaultdict[int, Moments] = defaultdict(Moments)

    def every(self) -> Iterator[tuple[int, tuple[WeightJob, Options]]]:
        """The jobs by number, with their options."""
        return enumerate(zip(self.jobs, self.options, strict=True))

    def restore(self) -> None:
        """Read the results of an earlier run from the store."""
        for number, (job, own) in self.every():
            kept = self.store.get(number, **_identity(job, own))
            if kept is not None:
                self.found[number] = kept[1]["damages"], kept[1]["share"]

    def heard(self, done: int, total: int) -> None:
        """Report the progress of the pass."""
        self.done = done, total
        self.progress("measuring predictions", done, total)

    def visit(self, node: fx.Node, values: Values, gradient: Tensor) -> None:
        """See `backward`."""
        if self.numbers[node] not in self.found:
            self.moments[self.numbers[node]].add(node, values, gradient)

    def left(self, node: fx.Node) -> None:
        """Compute the damages of a weight after the last of its nodes."""
        number = self.numbers[node]
        self.waiting[number] -= 1
        if self.waiting[number] or number in self.found:
            return
        job, own = self.jobs[number], self.options[number]
        self.progress(f"measuring {job.name}", *self.done)
        damages, share = _damages(self.graph, job, own, self.moments.pop(number), self.tokens)
        self.found[number] = damages, share
        self.store.put(number, {}, **_identity(job, own), damages=damages, share=share)


def _unseen(job: WeightJob, options: Options) -> list[float]:
    """The damages of a weight that the predictions do not depend on, such as a drafter's."""
    size = prod(job.shape)
    return [0.0 if form is None else _LEAST * 4.0 ** (-8 * nbytes / size) for form, nbytes in options]


def _identity(job: WeightJob, options: Options) -> dict[str, Any]:
    return {"name": job.name, "options": [form and form.name for form, _ in options]}


def _damages(graph: Graph, job: WeightJob, options: Options, seen: Moments, tokens: int) -> tuple[list[float], float]:
    """The damage of each option, and the share of a table."""
    weight = as_float(graph.weight(job.node.args[1]))  # type: ignore[arg-type]
    width = weight.shape[-1]
    table = seen.table / tokens / width  # a token reads one row: the mean over its columns
    if not seen.grams:
        return _errors(weight, torch.full((width,), table), torch.full((len(weight),), 1 / len(weight)), options), 0.0
    damages, share = [0.0] * len(options), 0.0
    planes = weight.reshape(-1, *weight.shape[-2:])
    for plane, moments, count, rows in zip(planes, seen.grams, seen.counts, seen.rows, strict=True):
        energy = float(rows.sum(dtype=torch.float64))
        if energy == 0:
            continue
        share = table / (energy / tokens)
        hessian = Hessian.from_gram(with_table(moments / count, share), DAMPING, act_order=True)
        found = _errors(plane, importance_of(hessian) * _few(hessian, count), rows / tokens, options)
        damages = [a + b for a, b in zip(damages, found, strict=True)]
    return damages, share


def _few(hessian: Hessian, tokens: int) -> float:
    """The factor by which errors are larger than `importance_of` says, because columns fit each other by chance on few
    tokens: the correction of a ridge regression's residuals for its degrees of freedom."""
    damping = DAMPING * float(hessian.gram.diagonal().mean())
    freedom = len(hessian.gram) - damping * float(hessian.factor.square().sum())
    return 1 / max(1 - freedom / tokens, _SURE)


def _errors(plane: Tensor, importance: Tensor, rows: Tensor, options: Options) -> list[float]:
    """Half the sum of rows[N] times importance[K] times the squared error of each value, for each format; estimated
    from some rows, drawn in proportion to their importance, if there are many."""
    factors = rows
    if len(plane) > _ROWS:
        chances = (rows * (plane.square() @ importance)).clamp(min=1e-30)
        chances /= chances.sum()
        drawn = torch.multinomial(chances, _ROWS, replacement=True, generator=torch.Generator().manual_seed(0))
        plane, factors = plane[drawn], rows[drawn] / chances[drawn] / _ROWS
    found = []
    for form, _ in options:
        if isinstance(form, BlockFormat):
            noise = form.decode(encode_blocks(form, plane, importance)).sub_(plane)
            found.append(0.5 * float((noise.square_() @ importance) @ factors))
        else:
            found.append(0.0)
    return found


def part(progress: Progress, start: float, end: float) -> Progress:
    """Progress for a part of some work, from share `start` to share `end` of it (0 to 1), whose own progress starts at
    0."""

    def heard(text: str, done: int, total: int) -> None:
        progress(text, round(1_000_000 * (start + (end - start) * done / max(total, 1))), 1_000_000)

    return heard


def guess(jobs: list[WeightJob], options: Sequence[Options]) -> Damages:
    """Damages that assume equally sensitive weights, for a plan without weights: they fall to a quarter per bit."""
    curves = []
    for job, found in zip(jobs, options, strict=True):
        size = prod(job.shape)
        damages = [0.0 if form is None else size * 4.0 ** (-8 * nbytes / size) for form, nbytes in found]
        curves.append(Curve(job.name, tuple(Option.of(*of, d) for of, d in zip(found, damages, strict=True))))
    return Damages(tuple(curves), (0.0,) * len(jobs))


def grams_of(node: fx.Node, inputs: Inputs) -> list[Tensor]:
    """The second moments of each expert's inputs (one expert for a linear layer), over all tokens: [K, K] each."""
    found = expert_rows(node, inputs)
    source = inputs[node.args[0]]  # type: ignore[index]
    total = max(1, sum(len(value) for value in source))
    return [gram(rows) / total for rows in found]


def with_table(moments: Tensor, share: float) -> Tensor:
    """The Hessian [K, K] of a matrix that is also an embedding: errors of its rows count `share` times those of
    outputs."""
    return moments + share * torch.eye(len(moments)) if share else moments


def importance_of(hessian: Hessian) -> Tensor:
    """The weight of each column's squared error [K] after GPTQ's feedback."""
    cost = torch.empty(len(hessian.order))
    cost[hessian.order] = hessian.factor.diagonal().square().reciprocal()
    return cost


def spread(sequences: Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    """`count` of the sequences, spread evenly."""
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
