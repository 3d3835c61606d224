"""Bits where they pay: a format per weight, chosen by measured damage against bytes, then rounded as GPTQ does.

Two things are measured of every weight: what error each format would leave in its layer's outputs after GPTQ's feedback
(the errors of its columns over the diagonal of the inverse Hessian's Cholesky factor, which is what algorithm 1 of
Frantar et al. 2022 leaves, without running it), and how much the model's predictions suffer from an error there
(the KL divergence when that weight alone is rounded). Their product is the damage; allocation.py spends the bytes.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log, prod
from typing import ClassVar, Literal

import torch
from torch import Tensor, fx

from ...compiler.graph.graph import Graph, type_of
from ...compiler.graph.together import MODEL, Variant, run_together
from ...compiler.weights.formats.affine import GroupAffine
from ...compiler.weights.formats.base import Misfit, Parts, StorageFormat, decibels
from ...compiler.weights.formats.blocks import BlockFormat
from ...compiler.weights.formats.fitting import BlockCoder, encode_blocks, fit_blocks
from ...compiler.weights.formats.ggml import GGML_FORMATS
from ...compiler.weights.formats.mixed import mixed
from ...compiler.weights.handles import PackedWeight, RoundedWeight
from ..allocation import Curve, Option, allocate
from ..base import PassContext, PassResult
from .gptq_solver import Hessian, solve
from .inputs import expert_rows, gram
from .select import EMBEDDING, Job, QuantizePass, as_float, lm_heads, plain_name, retype
from .stream import Inputs, stream

Role = Literal["product", "screen", "table"]
StoredBytes = Callable[[StorageFormat, Sequence[int], Role], int | None]
"""Bytes of a weight of a shape in the engine; None where the back end cannot store it so."""
PALETTE: tuple[tuple[str, int, int] | str, ...] = (
    ("n", 2, 32), ("n", 3, 32), ("n", 4, 32), "q4_1", ("s", 5, 32), ("s", 6, 32), ("s", 8, 64),
)  # fmt: skip
_DAMPING = 0.01
_ROWS = 256  # of a matrix, that stand for all of them when formats are compared
_PROBED = 12_000  # tokens of all variants together, by which sensitivities are measured
_LEAST, _MOST = 12, 64  # of a sequence


def _plain_bytes(form: StorageFormat, shape: Sequence[int], role: Role) -> int | None:
    return form.nbytes(shape)


@dataclass
class _Measured:
    """What is known of a job: its options' output errors, that of the probe, and for a head that is a table too its
    Hessian and the matrix's own error, because a table's rows are read one by one."""

    options: list[tuple[StorageFormat | None, int]]
    errors: list[float] = field(default_factory=list)
    probe: float = 0.0
    plain_probe: float = 0.0
    gram: Tensor | None = None


@dataclass(frozen=True)
class QuantizeAuto(QuantizePass):
    """`sequences` are the calibration token ids. budget: bytes of all weights, `fixed` of which are those of weights
    that nothing is chosen for. stored: see StoredBytes. searches=False reads and computes nothing: every weight gets
    the format that its size alone would get.
    """

    name: ClassVar[str] = "quantize-auto"
    tolerance: ClassVar[float | None] = None

    format: str = "q8"
    sequences: Sequence[Sequence[int]] = field(default=(), repr=False)
    budget: int = 1 << 62
    fixed: int = 0
    stored: StoredBytes = field(default=_plain_bytes, repr=False)
    searches: bool = True

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        jobs = self.all_jobs(graph, ctx)
        heads = lm_heads(graph)
        measured = {job.node: _Measured(self.options(graph, job, job.node in heads)) for job in jobs}
        if self.searches:
            self._measure(graph, jobs, measured, ctx)
            sensitivities, shares = self._sensitivities(graph, jobs, measured, ctx)
        else:
            sensitivities, shares = dict.fromkeys(measured, 1.0), {}
        curves = [self._curve(graph, job, measured[job.node], sensitivities[job.node], shares) for job in jobs]
        allocation = allocate(curves, self.budget, self.fixed)
        ctx.allocation = allocation
        chosen = {job.node: option.format for job, option in zip(jobs, allocation.options, strict=True)}
        kept = [job for job in jobs if chosen[job.node] is None]
        jobs = [replace(job, format=chosen[job.node]) for job in jobs if chosen[job.node] is not None]  # type: ignore[arg-type]
        if self.searches:
            self._round(graph, jobs, shares, ctx)
        else:
            for job in jobs:
                self.finish(graph, ctx, job, RoundedWeight(graph.weight(job.node.args[1]), job.format))  # type: ignore[arg-type]
        retype(graph)
        return PassResult(bool(jobs), Counter({"quantized": len(jobs), "as-stored": len(kept)}))

    # -- what there is to choose -------------------------------------------------------------------------------------

    def all_jobs(self, graph: Graph, ctx: PassContext) -> list[Job]:
        """The linear layers, and the token embeddings that are no layer's weight."""
        jobs = self.jobs(graph, ctx)
        seen: list[object] = [node.args[1] for job in jobs for node in (*job.nodes, *job.tables)]
        refused = {refusal.node for refusal in ctx.refusals}
        for node in graph.nodes:
            if node.op != "call_function" or node.target is not EMBEDDING:
                continue
            table = node.args[1]
            assert isinstance(table, fx.Node)
            shape = type_of(table).shape
            if table in seen or table.op != "get_attr" or len(shape) != 2 or shape[0] < graph.info.vocab_size:
                continue
            name = plain_name(table)
            if name not in refused and not any(name == job.name for job in jobs) and shape[1] % 32 == 0:
                jobs.append(Job(name, (node,), GroupAffine(32, 8)))
                seen.append(table)
        return jobs

    def options(self, graph: Graph, job: Job, is_head: bool) -> list[tuple[StorageFormat | None, int]]:
        """The formats that a weight can have, each with its bytes; None is what it has."""
        weight = graph.weight(job.node.args[1])  # type: ignore[arg-type]
        role: Role = "table" if job.node.target is EMBEDDING else "screen" if is_head else "product"
        own = self.stored(weight.storage, job.shape, role)
        found: list[tuple[StorageFormat | None, int]] = [] if own is None else [(None, own)]
        for item in PALETTE:
            try:
                form = (
                    mixed(*item, job.shape[-1]) if isinstance(item, tuple) else GGML_FORMATS[item].fitted(job.shape[-1])
                )
            except Misfit:
                continue
            nbytes = self.stored(form, job.shape, role)
            if nbytes is not None and form != weight.storage:
                found.append((form, nbytes))
        return found

    # -- what they cost ----------------------------------------------------------------------------------------------

    def _measure(self, graph: Graph, jobs: list[Job], measured: dict[fx.Node, _Measured], ctx: PassContext) -> None:
        """Errors of every option, by the inputs that the float model gives to each layer."""
        linear = {job.node: job for job in jobs if job.node.target is not EMBEDDING}
        done, total = 0, sum(prod(job.shape) for job in linear.values())

        def visit(node: fx.Node, inputs: Inputs) -> None:
            nonlocal done
            job, found = linear[node], measured[node]
            ctx.progress(f"measuring {job.name}", done, 2 * total)
            grams = _grams(node, inputs)
            weight = as_float(graph.weight(node.args[1]))  # type: ignore[arg-type]
            noise = _probe(job.shape[-1]).rounded(weight) - weight
            planes = noise.reshape(-1, *noise.shape[-2:])
            found.probe = sum(_energy(p, g) for p, g in zip(planes, grams, strict=True))
            found.plain_probe = float(noise.square().sum(dtype=torch.float64))
            if job.tables:
                found.gram = grams[0]  # its errors depend on how much tables suffer, which is not known yet
            else:
                found.errors = _errors(weight, grams, found.options)
            done += prod(job.shape)

        if linear:
            stream(graph, self.sequences, linear.keys(), visit)
        for job in jobs:
            if job.node not in linear:
                weight, found = as_float(graph.weight(job.node.args[1])), measured[job.node]  # type: ignore[arg-type]
                noise = _probe(job.shape[-1]).rounded(weight) - weight
                found.probe = float(noise.square().sum(dtype=torch.float64))
                found.errors = _errors(weight, [torch.eye(job.shape[-1])], found.options)

    def _sensitivities(
        self, graph: Graph, jobs: list[Job], measured: dict[fx.Node, _Measured], ctx: PassContext
    ) -> tuple[dict[fx.Node, float], dict[fx.Node, float]]:
        """KL divergence per unit of output error of every job; and, for heads that are tables too, how much an error of
        a table counts beside one of an output."""
        sites = [(job, job.nodes) for job in jobs] + [(job, job.tables) for job in jobs if job.tables]
        variants: list[Variant] = []
        for job, nodes in sites:
            weight = graph.weight(job.node.args[1])  # type: ignore[arg-type]
            variants.append(dict.fromkeys(nodes, RoundedWeight(weight, _probe(job.shape[-1]))))
        tokens = min(max(_PROBED // (2 * max(1, len(variants))), _LEAST), _MOST)
        ids = [list(sequence[:tokens]) for sequence in _spread(self.sequences, 2)]
        divergences = _divergences(graph, ids, variants, ctx)
        own = divergences[: len(jobs)]
        raw = {
            job.node: max(kl, 1e-12) / max(measured[job.node].probe, 1e-30) for job, kl in zip(jobs, own, strict=True)
        }
        tables = {job.node: kl for (job, _), kl in zip(sites[len(jobs) :], divergences[len(jobs) :], strict=True)}
        shares = {
            node: max(kl, 1e-12) / max(measured[node].plain_probe, 1e-30) / raw[node] for node, kl in tables.items()
        }
        return _smoothed(jobs, raw), shares

    def _curve(
        self, graph: Graph, job: Job, found: _Measured, sensitivity: float, shares: dict[fx.Node, float]
    ) -> Curve:
        if not self.searches:  # as if all weights were alike
            found.errors = [
                0.0 if form is None else prod(job.shape) * 4.0 ** (-8 * nbytes / prod(job.shape))
                for form, nbytes in found.options
            ]
        elif found.gram is not None:
            weight = as_float(graph.weight(job.node.args[1]))  # type: ignore[arg-type]
            found.errors = _errors(weight, [_shared(found.gram, shares[job.node])], found.options)
            found.gram = None
        options = [
            Option(form, nbytes, sensitivity * error)
            for (form, nbytes), error in zip(found.options, found.errors, strict=True)
        ]
        return Curve(job.name, tuple(options), sensitivity)

    # -- rounding ----------------------------------------------------------------------------------------------------

    def _round(self, graph: Graph, jobs: list[Job], shares: dict[fx.Node, float], ctx: PassContext) -> None:
        """GPTQ, each layer by what the rounded layers before it give to it."""
        linear = {job.node: job for job in jobs if job.node.target is not EMBEDDING}
        done, total = 0, sum(prod(job.shape) for job in linear.values())
        for job in jobs:
            if job.node not in linear:
                form = job.format
                assert isinstance(form, BlockFormat)
                weight = as_float(graph.weight(job.node.args[1]))  # type: ignore[arg-type]
                self._store(graph, ctx, job, weight, encode_blocks(form, weight))

        def visit(node: fx.Node, inputs: Inputs) -> None:
            nonlocal done
            job = linear[node]
            form = job.format
            assert isinstance(form, BlockFormat)
            ctx.progress(job.name, total + done, 2 * total)
            weight = as_float(graph.weight(node.args[1]))  # type: ignore[arg-type]
            planes = weight.reshape(-1, *weight.shape[-2:])
            parts: list[Parts] = []
            signal = noise = 0.0
            for plane, moments in zip(planes, _grams(node, inputs), strict=True):
                hessian = Hessian.from_gram(_shared(moments, shares.get(node, 0.0)), _DAMPING, act_order=True)
                fitted = fit_blocks(form, plane, _importance(hessian))
                solved = solve(plane, hessian, BlockCoder(form), fitted=fitted)
                signal, noise = signal + solved.signal, noise + solved.noise
                parts.append(solved.parts)
            joined = {name: torch.stack([p[name] for p in parts]).reshape(*weight.shape[:-1], -1) for name in parts[0]}
            self._store(graph, ctx, job, weight, joined, decibels(signal, noise))
            done += prod(job.shape)

        if linear:
            stream(graph, self.sequences, linear.keys(), visit)

    def _store(
        self, graph: Graph, ctx: PassContext, job: Job, weight: Tensor, parts: Parts, output: float | None = None
    ) -> None:
        error = float((job.format.decode(parts) - weight).square().sum(dtype=torch.float64))
        snr = decibels(float(weight.square().sum(dtype=torch.float64)), error)
        packed = PackedWeight.pack(parts, job.format, weight.shape, snr)
        self.finish(graph, ctx, job, packed, output_snr_db=output)


def _probe(k: int) -> GroupAffine:
    """A coarse format that is quick to round to."""
    return GroupAffine(128, 4).fitted(k)


def _grams(node: fx.Node, inputs: Inputs) -> list[Tensor]:
    """The second moments of what each expert reads (of a linear layer, one), over all tokens: [K, K] each."""
    found = expert_rows(node, inputs)
    source = inputs[node.args[0]]  # type: ignore[index]
    total = max(1, sum(len(value) for value in source))
    return [gram(rows) / total for rows in found]


def _energy(noise: Tensor, moments: Tensor) -> float:
    """The mean energy of outputs noise x per token."""
    return float(((noise @ moments) * noise).sum(dtype=torch.float64))


def _shared(moments: Tensor, share: float) -> Tensor:
    """The Hessian of a matrix that is a table too: errors of its own count as `share` of those of outputs."""
    return moments + share * torch.eye(len(moments)) if share else moments


def _importance(hessian: Hessian) -> Tensor:
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
        importance, rows = _importance(Hessian.from_gram(moments, _DAMPING, act_order=True)), plane[::step]
        for i, (form, _) in enumerate(options):
            if isinstance(form, BlockFormat):
                noise = form.decode(encode_blocks(form, rows, importance)) - rows
                errors[i] += float((noise.square() * importance).sum(dtype=torch.float64)) * count / len(rows)
    return errors


def _spread(sequences: Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    """Some of the sequences, from all over."""
    step = max(1, len(sequences) // count)
    return list(sequences[::step][:count])


def _divergences(graph: Graph, sequences: list[list[int]], variants: list[Variant], ctx: PassContext) -> list[float]:
    """The mean KL divergence per token of each variant from the model."""
    found = [0.0] * len(variants)
    model = torch.empty(0)
    count = sum(map(len, sequences))
    for answer in run_together(graph, sequences, variants):
        logs = torch.log_softmax(answer.logits, -1)
        if answer.variant == MODEL:
            model = logs
        else:
            found[answer.variant] += float((model.exp() * (model - logs)).sum(dtype=torch.float64)) / max(count, 1)
    return found


def _smoothed(jobs: Sequence[Job], raw: dict[fx.Node, float]) -> dict[fx.Node, float]:
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
