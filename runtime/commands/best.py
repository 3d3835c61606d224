"""`run --best-of`: several completions, of which the best by a judge, or by likelihood, is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from .run import RunResult, timed

if TYPE_CHECKING:
    from ..llm import LLM
    from ..requests.generation import Completion
    from ..requests.params import SamplingParams


def run_best(
    llm: LLM,
    token_ids: Sequence[int],
    params: SamplingParams,
    show: Callable[[str], object],
    judge: tuple[Path, str | Sequence[int]] | None = None,
) -> RunResult:
    """Generate `params.n` completions; `show` gets the text of the best (token ids without a tokenizer).

    judge: an engine that scores texts, and the question, as text or token ids; None: the completion with the highest
    mean log-probability is the best. UsageError if the engine does not score texts.
    """
    if judge is None and params.logprobs is None:
        params = replace(params, logprobs=0)
    found = llm.generate([list(token_ids)], params)
    if judge is None:
        best = max(found, key=_likelihood)
    else:
        engine, question = judge
        text = question if isinstance(question, str) or llm.tokenizer is None else llm.tokenizer.decode(question)
        best = found[_judged(engine, text, [one.text for one in found])]
    show(best.text if llm.tokenizer is not None else "".join(f"{token} " for token in best.token_ids))
    return timed(best)


def _likelihood(completion: Completion) -> float:
    """The mean log-probability of the completion's tokens."""
    logprobs = completion.logprobs or ()
    return sum(one.logprob for one in logprobs) / max(len(logprobs), 1)


def _judged(engine: Path, question: str | Sequence[int], answers: Sequence[str]) -> int:
    """The index of the answer that the engine scores highest."""
    from ..loading import load

    if not isinstance(question, str):
        raise UsageError("--judge: it reads texts, and the engine has no tokenizer", "leave it out")
    with load(engine) as llm:
        facts = llm.manifest.embedding
        if facts is None or not facts.scores:
            raise UsageError(
                f"--judge {engine}: the engine does not score texts", "compile the judge with --task rerank"
            )
        return llm.rerank(question, answers, top_n=1, truncate=True)[0].index
