"""`icc compile --gate`: measures what the built engine, including its kernels, loses against the model that it was
compiled from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp
from pathlib import Path

import torch
from torch import Tensor

from ...passes.quantized import QuantRecord
from ...runtime.errors import DeviceError
from ...runtime.format.manifest import GateFacts
from ...runtime.llm import LLM
from ...runtime.loading import open_llm
from ...runtime.options import LoadOptions
from ..errors import GateError, UsageError
from ..gates import Gate, GatePlan
from ..graph.graph import Graph
from ..graph.together import MODEL, Variant, run_together
from ..targets import Target

Progress = Callable[[str, int, int], None]
_TO_BLAME = 12  # weights that are examined when the gate fails
_SHOWN = 3
_BLAME_TOKENS = 128


@dataclass
class Loss:
    """Sums over tokens, in nats. reference, found: negative log-likelihood by the reference and by the measured model,
    over the `scored` tokens that follow another. kl: Kullback-Leibler divergence KL(reference || measured), over all
    `tokens`."""

    reference: float = 0.0
    found: float = 0.0
    kl: float = 0.0
    scored: int = 0
    tokens: int = 0

    def add(self, ids: Sequence[int], reference: Tensor, found: Tensor, start: int = 0) -> None:
        """Add logits [n, vocab] of the tokens `ids[start:]`."""
        p, q = torch.log_softmax(reference.double(), -1), torch.log_softmax(found.double(), -1)
        self.kl += float((p.exp() * (p - q)).sum())
        self.tokens += len(p)
        following = torch.tensor(ids[start + 1 : start + 1 + len(p)])
        rows = torch.arange(len(following))
        self.reference -= float(p[rows, following].sum())
        self.found -= float(q[rows, following].sum())
        self.scored += len(following)

    @property
    def mean_kl(self) -> float:
        """The mean KL divergence per token, in nats."""
        return self.kl / max(self.tokens, 1)

    @property
    def increase(self) -> float:
        """The relative increase of perplexity: 0.01 is 1 %."""
        return exp(min((self.found - self.reference) / max(self.scored, 1), 700.0)) - 1

    def of(self, metric: str) -> float:
        """The value that a gate of this metric bounds."""
        return self.increase if metric == "ppl" else self.mean_kl


def check_device(target: Target) -> None:
    """UsageError if engines for the target cannot be run on this machine, so that nothing could be measured."""
    if target.backend == "cpu":
        return
    why = f"engines for {target.backend} do not run here"
    if target.backend == "cuda":
        from ...runtime.executor.cuda.driver import Cuda

        try:
            cuda = Cuda()
        except DeviceError as error:
            why = error.message
        else:
            have = "sm_{}{}".format(*cuda.facts().capability)
            cuda.close()
            if have == target.arch:
                return
            why = f"this machine's GPU is {have}"
    raise UsageError(
        f"--gate measures the engine as built, and an engine for {target.name} cannot run on this machine: {why}",
        "gate where that GPU is, or gate the quantization with --target cpu",
    )


def gate(
    engine: Path,
    plan: GatePlan,
    reference: Graph,
    quantized: Graph,
    records: Sequence[QuantRecord],
    progress: Progress,
) -> GateFacts:
    """What the engine loses against `reference`. GateError if it is more than the plan allows.

    quantized: the same graph with the engine's weights. records: how each weight was quantized. Both serve to explain a
    loss that is too large.
    """
    loss = Loss()
    with open_llm(LoadOptions(engine, verify=False, spec="none")) as llm:
        assert llm.engine is not None, "it was opened from a directory"
        rounded = any(group.dtype != "f32" for group in llm.engine.program.kv.groups)
        for found in run_together(reference, plan.sequences, heard=partial(progress, "")):
            ids = plan.sequences[found.sequence]
            for start, rows in _chunks(llm, ids):
                loss.add(ids, found.logits[start : start + len(rows)], rows, start)
    for asked in plan.gates:
        if not loss.of(asked.metric) <= asked.limit:
            ids = list(plan.sequences[0])[:_BLAME_TOKENS]
            raise _failure(asked, loss, ids, reference, quantized, records, rounded)
    return GateFacts(
        asked=[str(asked) for asked in plan.gates],
        text=plan.text,
        tokens=loss.scored,
        reference_perplexity=_digits(exp(min(loss.reference / max(loss.scored, 1), 700.0))),
        perplexity=_digits(exp(min(loss.found / max(loss.scored, 1), 700.0))),
        perplexity_increase=_digits(loss.increase),
        kl=_digits(loss.mean_kl),
    )


def _chunks(llm: LLM, ids: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """The logits of chunks of tokens, [n, vocab], each with the number of its first token."""
    start = 0
    for chunk in llm.iter_logits(ids):
        yield start, torch.from_numpy(chunk)
        start += len(chunk)


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


# -- what is to blame ------------------------------------------------------------------------------------------------


def _failure(
    asked: Gate,
    loss: Loss,
    ids: list[int],
    reference: Graph,
    quantized: Graph,
    all_records: Sequence[QuantRecord],
    rounded: bool,
) -> GateError:
    """The error of a failed gate: in one line the loss and the weights to blame, and a hint. rounded: whether the KV
    cache is not float32."""
    found = loss.of(asked.metric)
    shown = f"{100 * found:.2f} %" if asked.metric == "ppl" else f"{found:.4f}"
    what = "perplexity rises by" if asked.metric == "ppl" else "the mean KL divergence per token is"
    records = _suspects(all_records)
    variants = [_restored(quantized, record) for record in records]
    loosen = "a looser --gate"
    kernels = f"{'--kv-cache f32, or ' if rounded else ''}{loosen}"
    rest = f"the rest is the kernels' rounding (8-bit activations{', the KV cache' if rounded else ''})"
    if not records:
        message = f"--gate {asked}: {what} {shown}, though no weight was quantized: {rest}"
        return GateError(asked.metric, found, asked.limit, message, kernels)
    whole, without = _kl_of(reference, quantized, ids, variants)
    if whole.kl < 0.5 * loss.mean_kl * whole.tokens:
        share = 100 * whole.mean_kl / loss.mean_kl
        message = f"--gate {asked}: {what} {shown}, of which the stored weights explain {share:.0f} %: {rest}"
        return GateError(asked.metric, found, asked.limit, message, kernels)
    order = sorted(range(len(records)), key=lambda i: without[i].kl)[:_SHOWN]
    parts = [f"{records[i].name} ({_share(whole, without[i])})" for i in order if without[i].kl < whole.kl]
    blame = f"; the worst: {', '.join(parts)}" if parts else ""
    names = " ".join(f"--keep '{records[i].name}'" for i in order if without[i].kl < whole.kl)
    hint = f"{names + ', or ' if names else ''}--quant auto with more --size, or {loosen}"
    return GateError(asked.metric, found, asked.limit, f"--gate {asked}: {what} {shown}{blame}", hint)


def _share(whole: Loss, without: Loss) -> str:
    return f"{100 * (1 - without.kl / whole.kl):.0f} % of the KL divergence"


def _suspects(records: Sequence[QuantRecord]) -> list[QuantRecord]:
    """The weights with the lowest signal-to-noise ratios: of their outputs if these were recorded, else of the
    weights."""

    def noise(record: QuantRecord) -> float:
        return record.weight_snr_db if record.output_snr_db is None else record.output_snr_db

    return sorted((r for r in records if r.source is not None), key=noise)[:_TO_BLAME]


def _restored(graph: Graph, record: QuantRecord) -> Variant:
    """The variant of the quantized model with one weight unquantized."""
    assert record.source is not None
    readers = [n for n in graph.nodes if n.op == "get_attr" and graph.weight(n) is record.weight]
    return {user: record.source for node in readers for user in node.users if user.args[1] is node}


def _kl_of(
    reference: Graph, quantized: Graph, ids: Sequence[int], variants: Sequence[Variant]
) -> tuple[Loss, list[Loss]]:
    """The loss of the quantized graph on one sequence, and the loss of each of its variants."""
    [wanted] = [found.logits for found in run_together(reference, [ids])]
    losses: dict[int, Loss] = {}
    for found in run_together(quantized, [ids], variants):
        losses[found.variant] = Loss()
        losses[found.variant].add(ids, wanted, found.logits)
    return losses[MODEL], [losses[i] for i in range(len(variants))]
