"""Perplexity of an unquantized checkpoint, by the reference interpreter, on the windows that an engine uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ...passes import pipelines
from ...passes.base import PassContext
from ...passes.manager import run_passes
from ...runtime.commands.evaluate import Evaluation, evaluate_text
from ...runtime.format.load import open_engine
from ...runtime.tokenizer import Tokenizer
from ..frontend.load import load_graph
from ..graph.interpret import interpret


class _Reference:
    """The part of an LLM's interface that evaluate_text needs, computed by the interpreter."""

    def __init__(self, model: Path, engine: Path) -> None:
        opened = open_engine(engine, verify=False)
        self.manifest = opened.manifest
        tokenizer_json = opened.tokenizer_json()
        self.tokenizer = Tokenizer(tokenizer_json) if tokenizer_json else None
        self.graph = load_graph(model, self.manifest.limits.max_seq_len)
        run_passes(self.graph, pipelines.canonicalize(), PassContext())
        opened.close()

    def iter_logits(self, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Logits of all tokens in one chunk, float32 [T, vocab]."""
        yield interpret(self.graph, token_ids).numpy()


def evaluate_checkpoint(model: Path, engine: Path, text: Path) -> Evaluation:
    """The checkpoint's perplexity on `text`, cut into windows as for `engine`."""
    return evaluate_text(_Reference(model, engine), text.read_text(encoding="utf-8"))
