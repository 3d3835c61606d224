"""EngineJudge: an engine of `--task rerank`, in its own process, as the judge of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...errors import UsageError
from ...options import LoadOptions
from ...requests.embedding import score_of
from ..log import LogOptions
from .best import Judge
from .core import Core
from .embeddings import vectors_of
from .keys import ApiKeys
from .requests import RerankRequest


class EngineJudge(Judge):
    """Loads the engine at `path` with the options in `load`, whose own path is ignored. UsageError if it does not score
    texts."""

    def __init__(self, path: Path, load: LoadOptions, log_options: LogOptions | None = None) -> None:
        self.core = Core(replace(load, path=path, spec="none"), ApiKeys(), log_options=log_options)
        facts = self.core.model.manifest.embedding
        if facts is None or not facts.scores:
            raise UsageError(f"--judge {path}: the engine does not score texts", "compile the judge with --task rerank")
        self._facts = facts

    async def start(self) -> None:
        """Start the engine process. IccError if the engine cannot be loaded."""
        await self.core.start()

    async def stop(self) -> None:
        """End the engine process."""
        await self.core.stop()

    async def scores(self, question: str, answers: Sequence[str]) -> list[float]:
        """The score of each answer to the question; in a pair that is too long, the longer text is cut."""
        request = RerankRequest(
            model=self.core.model.name, query=question, documents=list(answers), truncate_prompt_tokens=-1
        )
        job = await self.core.jobs.rerank(request, "")
        vectors = [np.frombuffer(raw, dtype="<f4") async for raw in vectors_of(self.core.generator, job)]
        return [score_of(vector, self._facts) for vector in vectors]
