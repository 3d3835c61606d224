"""EngineJudge: an engine of `--task rerank`, in its own process, as the judge of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...errors import UsageError
from ...options import LoadOptions
from ...requests.embedding import score_of
from ..engine.engine_stream import EngineFailed
from ..log import LogOptions
from .best import Judge
from .core import Core
from .embeddings import vectors_of
from .errors import HttpError
from .keys import ApiKeys
from .requests import RerankRequest


class EngineJudge(Judge):
    """Loads the engine at `path` with the options in `load`, whose own path is ignored. UsageError if it does not score
    texts, or has no tokenizer."""

    def __init__(self, path: Path, load: LoadOptions, log_options: LogOptions | None = None) -> None:
        self.core = Core(replace(load, path=path, spec="none"), ApiKeys(), log_options=log_options)
        facts = self.core.model.manifest.embedding
        if facts is None or not facts.scores:
            raise UsageError(f"--judge {path}: the engine does not score texts", "compile the judge with --task rerank")
        if self.core.model.tokenizer is None:
            raise UsageError(f"--judge {path}: the engine has no tokenizer", "compile the judge with its tokenizer")
        self._facts = facts

    async def start(self) -> None:
        """Start the engine process. IccError if the engine cannot be loaded."""
        await self.core.start()

    async def stop(self) -> None:
        """End the engine process."""
        await self.core.stop()

    def check(self) -> None:
        """EngineFailed, status 503, while the engine is being started again."""
        if not self.core.engine.ready:
            raise EngineFailed(503, "the judge is not ready")

    async def scores(self, question: str, answers: Sequence[str], seconds: float | None = None) -> list[float]:
        """See Judge; in a pair that is too long, the longer text is cut. EngineFailed if the process dies or hangs."""
        request = RerankRequest(
            model=self.core.model.name,
            query=question,
            documents=list(answers),
            truncate_prompt_tokens=-1,
            deadline=seconds,
        )
        try:
            job = await self.core.jobs.rerank(request, "")
            vectors = [np.frombuffer(raw, dtype="<f4") async for raw in vectors_of(self.core.generator, job)]
        except EngineFailed as error:
            raise EngineFailed(error.status, f"the judge: {error.message}", began=error.began) from error
        except HttpError as error:
            raise HttpError(error.status, f"the judge: {error.message}", code=error.code) from error
        return [score_of(vector, self._facts) for vector in vectors]
