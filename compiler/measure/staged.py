"""Opens an engine that is not completely written yet, to time its steps on this machine."""

from __future__ import annotations

from pathlib import Path

from ...runtime.batch.scheduled import ScheduledBatch, ScheduledSequence
from ...runtime.batch.tables import plain_tables
from ...runtime.executor.player import Player
from ...runtime.format.files import EngineFiles
from ...runtime.format.folder import Folder
from ...runtime.format.load import Engine
from ...runtime.format.manifest import Limits, ModelFacts, QuantFacts
from ...runtime.format.weights import MappedWeights
from ..backends.base import Built
from ..engine.manifest import kernel_manifest
from ..targets import Target

CONTEXT = 64  # tokens in the cache before a timed step


def open_staged(stage: Path, target: Target, built: Built, limits: Limits, kernels: Path | None = None) -> Engine:
    """An engine of the weights in `stage` and the kernels below `kernels`; None: those in `stage`. The caller closes
    it."""
    model = ModelFacts(
        architecture="",
        vocab_size=built.program.vocab_size,
        hidden_size=0,
        num_layers=0,
        num_parameters=0,
        max_seq_len=limits.max_seq_len,
        bos_token_id=None,
        eos_token_ids=[],
        pad_token_id=None,
    )
    manifest = kernel_manifest(target, built, limits, model, QuantFacts(method="", bits_per_weight=0.0, kept=[]))
    file = manifest.main.weights
    weights = MappedWeights(EngineFiles(Folder(stage), {}, verify=False).map(file), file)
    library = built.libraries[0]
    return Engine(
        stage, manifest, built.program, weights, library, EngineFiles(Folder(kernels or stage), {}, verify=False)
    )


def verify_step(executor: Player, tokens: int, max_seq_len: int) -> ScheduledBatch:
    """A step that verifies `tokens` - 1 guesses after a short context, whose KV is computed first."""
    start = max(min(CONTEXT, executor.max_step_tokens, max_seq_len - tokens), 0)
    tables = plain_tables(executor.groups, start + tokens)
    if start:
        executor.step(ScheduledBatch((ScheduledSequence(1, (1,) * start, 0, tables, 0),)))
    return ScheduledBatch((ScheduledSequence(1, (1,) * tokens, start, tables, tokens),))
