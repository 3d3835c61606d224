"""Mixed precision: a format per weight, chosen by measured damage against bytes, then rounded as GPTQ does."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, fx

from ...compiler.graph.graph import Graph
from ...compiler.graph.tensor_types import type_of
from ...compiler.weights.formats.affine import GroupAffine
from ...compiler.weights.formats.base import Misfit, Parts, StorageFormat, decibels
from ...compiler.weights.formats.blocks import BlockFormat
from ...compiler.weights.formats.fitting import BlockCoder, encode_blocks, fit_blocks
from ...compiler.weights.formats.ggml import GGML_FORMATS
from ...compiler.weights.formats.mixed import mixed
from ...compiler.weights.handles import PackedWeight, RoundedWeight
from ..allocation import allocate, check_smallest
from ..base import PassContext, PassResult
from .damage import DAMPING, Damages, Options, grams_of, guess, importance_of, measure, part, with_table
from .gptq_solver import Hessian, solve
from .select import EMBEDDING, QuantizePass, WeightJob, as_float, lm_heads, plain_name, retype
from .store import NOWHERE, PassStore
from .stream import Inputs, stream

Role = Literal["product", "screen", "table"]
StoredBytes = Callable[[StorageFormat, Sequence[int], Role], int | None]
"""Bytes of a weight of a shape in the engine; None if the back end cannot store it in the format."""
PALETTE: tuple[tuple[str, int, int] | str, ...] = (
    ("n", 2, 32), ("n", 3, 32), ("n", 4, 32), "q4_1", ("s", 5, 32), ("s", 6, 32), ("s", 8, 64),
)  # fmt: skip

MEASURING = 0.55  # approximate share of the pass's time


@dataclass
class _Hessians:
    """The Hessians of the last layer, reused if the next layer reads the same value."""

    key: tuple[Any, ...] = ()
    found: list[Hessian] = field(default_factory=list)

    def of(self, node: fx.Node, inputs: Inputs, share: float) -> list[Hessian]:
        """One Hessian per expert; one for a linear layer. share: the weight of the table's error, if the matrix is also
        an embedding."""
        key = (node.target, node.args[0], node.args[3:], share)
        if key != self.key:
            moments = grams_of(node, inputs)
            self.found = [Hessian.from_gram(with_table(gram, share), DAMPING, act_order=True) for gram in moments]
            self.key = key
        return self.found


def _plain_bytes(form: StorageFormat, shape: Sequence[int], role: Role) -> int | None:
    return form.nbytes(shape)


@dataclass(frozen=True)
class QuantizeAuto(QuantizePass):
    """`sequences` are the calibration token ids. budget: bytes of all weights, `fixed` of which belong to weights
    without a choice. stored: see StoredBytes. searches=False reads and computes nothing: every weight gets the format
    that is chosen by its size only.
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
        options = [self.options(graph, job, job.node in heads) for job in jobs]
        check_smallest(self.fixed + sum(min(nbytes for _, nbytes in each) for each in options), self.budget)
        found = self._measured(graph, jobs, options, ctx) if self.searches else guess(jobs, options)
        allocation = allocate(found.curves, self.budget, self.fixed)
        ctx.allocation = allocation
        chosen = {job.node: option.format for job, option in zip(jobs, allocation.options, strict=True)}
        shares = {job.node: share for job, share in zip(jobs, found.shares, strict=True)}
        kept = [job for job in jobs if chosen[job.node] is None]
        jobs = [replace(job, format=chosen[job.node]) for job in jobs if chosen[job.node] is not None]  # type: ignore[arg-type]
        if self.searches:
            self._round(graph, jobs, shares, ctx)
        else:
            for job in jobs:
                self.finish(graph, ctx, job, RoundedWeight(graph.weight(job.node.args[1]), job.format))  # type: ignore[arg-type]
        retype(graph)
        return PassResult(bool(jobs), Counter({"quantized": len(jobs), "as-stored": len(kept)}))

    def _measured(self, graph: Graph, jobs: list[WeightJob], options: list[Options], ctx: PassContext) -> Damages:
        store = PassStore(ctx.calibrations / f"{self.name}-measured" if ctx.calibrations else None)
        return measure(graph, jobs, options, self.sequences, part(ctx.progress, 0.0, MEASURING), store)

    # -- the choices -------------------------------------------------------------------------------------------------

    def all_jobs(self, graph: Graph, ctx: PassContext) -> list[WeightJob]:
        """The linear layers, and the token embeddings that are not also a layer's weight."""
        jobs = self.jobs(graph, ctx)
        weights = [node.args[1] for job in jobs for node in (*job.nodes, *job.tables)]
        seen = {node.target for node in weights if isinstance(node, fx.Node)}
        refused = {refusal.node for refusal in ctx.refusals}
        for node in graph.nodes:
            if node.op != "call_function" or node.target is not EMBEDDING:
                continue
            table = node.args[1]
            assert isinstance(table, fx.Node)
            shape = type_of(table).shape
            if table.target in seen or table.op != "get_attr" or len(shape) != 2 or shape[0] < graph.info.vocab_size:
                continue
            name = plain_name(table)
            if name not in refused and shape[1] % 32 == 0:
                jobs.append(WeightJob(name, (node,), GroupAffine(32, 8)))
                seen.add(table.target)
        return jobs

    def options(self, graph: Graph, job: WeightJob, is_head: bool) -> Options:
        """The formats that a weight can have, each with its bytes; None stands for its current form."""
        weight = graph.weight(job.node.args[1])  # type: ignore[arg-type]
        role: Role = "table" if job.node.target is EMBEDDING else "screen" if is_head else "product"
        own = self.stored(weight.storage, job.shape, role)
        found: Options = [] if own is None else [(None, own)]
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

    # -- rounding ----------------------------------------------------------------------------------------------------

    def _round(self, graph: Graph, jobs: list[WeightJob], shares: dict[fx.Node, float], ctx: PassContext) -> None:
        """Round by GPTQ, each layer with the inputs that the rounded layers before it give."""
        linear = {job.node: job for job in jobs if job.node.target is not EMBEDDING}
        numbers = {node: number for number, node in enumerate(linear)}
        store = self._rounded(jobs, ctx)
        waiting = [node for node, job in linear.items() if not self._restore(graph, ctx, job, store, numbers[node])]
        total = sum(prod(job.shape) for job in linear.values())
        done = total - sum(prod(linear[node].shape) for node in waiting)
        progress = part(ctx.progress, MEASURING, 1.0)
        hessians = _Hessians()
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
            progress(job.name, done, total)
            weight = as_float(graph.weight(node.args[1]))  # type: ignore[arg-type]
            planes = weight.reshape(-1, *weight.shape[-2:])
            parts: list[Parts] = []
            signal = noise = 0.0
            for plane, hessian in zip(planes, hessians.of(node, inputs, shares[node]), strict=True):
                fitted = fit_blocks(form, plane, importance_of(hessian))
                solved = solve(plane, hessian, BlockCoder(form), fitted=fitted)
                signal, noise = signal + solved.signal, noise + solved.noise
                parts.append(solved.parts)
            joined = {name: torch.stack([p[name] for p in parts]).reshape(*weight.shape[:-1], -1) for name in parts[0]}
            packed = self._store(graph, ctx, job, weight, joined, decibels(signal, noise))
            facts = {"snr": packed.snr_db, "output_snr": decibels(signal, noise)}
            store.put(numbers[node], packed.held, name=job.name, **facts)
            done += prod(job.shape)

        if waiting:
            stream(graph, self.sequences, waiting, visit, store=store)

    def _rounded(self, jobs: list[WeightJob], ctx: PassContext) -> PassStore:
        """The store of earlier rounding, valid only if the same format was chosen for every weight, as each layer's
        inputs depend on those before it."""
        if ctx.calibrations is None:
            return NOWHERE
        chosen = json.dumps([[job.name, job.format.name] for job in jobs]).encode()
        return PassStore(ctx.calibrations / f"{self.name}-{hashlib.sha256(chosen).hexdigest()[:16]}")

    def _restore(self, graph: Graph, ctx: PassContext, job: WeightJob, store: PassStore, number: int) -> bool:
        """Restore a weight that an earlier run has rounded; False if none has."""
        found = store.get(number, name=job.name)
        if found is not None:
            held, facts = found
            packed = PackedWeight(held, job.format, torch.Size(job.shape), facts["snr"])
            self.finish(graph, ctx, job, packed, output_snr_db=facts["output_snr"])
        return found is not None

    def _store(
        self, graph: Graph, ctx: PassContext, job: WeightJob, weight: Tensor, parts: Parts, output: float | None = None
    ) -> PackedWeight:
        error = float((job.format.decode(parts) - weight).square().sum(dtype=torch.float64))
        snr = decibels(float(weight.square().sum(dtype=torch.float64)), error)
        packed = PackedWeight.pack(parts, job.format, weight.shape, snr)
        self.finish(graph, ctx, job, packed, output_snr_db=output)
        return packed
