"""An engine that is not written to its end yet, opened to time its steps on this machine."""

from __future__ import annotations

from pathlib import Path

from ...runtime.batch.scheduled import ScheduledBatch, ScheduledSequence
from ...runtime.batch.tables import plain_tables
from ...runtime.executor.player import Player
from ...runtime.format.files import EngineFiles
from ...runtime.format.load import Engine
from ...runtime.format.manifest import (
    FORMAT_VERSION,
    Library,
    Limits,
    Manifest,
    ModelFacts,
    QuantFacts,
    SamplingDefaults,
)
from ...runtime.format.program import Program
from ...runtime.format.weights import MappedWeights

CONTEXT = 64  # tokens in the cache behind which a timed step runs


def open_staged(stage: Path, program: Program, library: Library, limits: Limits, kernels: Path | None = None) -> Engine:
    """The weights in `stage`, and the kernels there or below `kernels`, as an engine. The caller closes it."""
    facts = ModelFacts("", program.vocab_size, 0, 0, 0, limits.max_seq_len, None, [], None)
    manifest = Manifest(
        FORMAT_VERSION,
        "",
        "native",
        "cpu",
        facts,
        QuantFacts("", 0.0, []),
        limits,
        SamplingDefaults(),
        [library],
        "",
        "",
        None,
        {},
    )
    weights = MappedWeights(EngineFiles(stage, {}, verify=False).map("weights.safetensors"), "weights.safetensors")
    return Engine(stage, manifest, program, weights, library, EngineFiles(kernels or stage, {}, verify=False))


def verify_step(executor: Player, tokens: int, max_seq_len: int) -> ScheduledBatch:
    """A step that verifies `tokens` - 1 guesses behind a short context, which is computed here."""
    start = max(min(CONTEXT, max_seq_len - tokens), 0)
    tables = plain_tables(executor.groups, start + tokens)
    if start:
        executor.step(ScheduledBatch((ScheduledSequence(1, (1,) * start, 0, tables, 0),)))
    return ScheduledBatch((ScheduledSequence(1, (1,) * tokens, start, tables, tokens),))
