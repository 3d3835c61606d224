"""What engines with a layer that guesses are held to, whoever's layer it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from icc.runtime.format.load import open_engine
from icc.runtime.llm import LLM
from icc.runtime.loading import load
from icc.runtime.requests.params import SamplingParams


def always(llm: LLM, name: str) -> LLM:
    """Guesses at every step, and what fails is not hidden."""
    assert llm.loop.speculator is not None and llm.loop.speculator.drafter.name == name
    llm.loop.speculator.adaptive = False
    return llm


def check_tokens(
    engine: Path, name: str, prompts: Sequence[list[int]], params: Sequence[SamplingParams], plain: list[Any]
) -> None:
    """Several requests at once, twice, so that prompts are found in the cache; also with a cache so small that requests
    are preempted, and with second choices beside the chains."""
    with closing(open_engine(engine)) as opened:
        small = sum(group.block_bytes() for group in opened.program.kv.groups) * 8
    for memory in (None, small):
        with load(engine, threads=2, kv_bytes=memory) as llm:
            drafter = always(llm, name).loop.speculator.drafter
            drafter.trees = memory is not None
            drafter.seconds.share = 0.9
            for _ in range(2):
                assert llm.generate(prompts, params) == plain
            assert llm.loop.speculator is not None
            assert llm.loop.speculator.counts.accepted > 10
            llm.loop.scheduler.check()


def check_chains(
    engine: Path,
    name: str,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    reference: Callable[[list[int], int], list[int]],
) -> None:
    """Each chain against `reference(text, count)`: with prompts in one step and in several, alone and beside others,
    behind accepted guesses."""
    with load(engine, threads=1) as llm:
        drafter, seen = always(llm, name).loop.speculator.drafter, []
        propose, drafter.trees = drafter.propose, False

        def watched(wishes: Any) -> Any:
            found = propose(wishes)
            texts = {w.generation.request_id: [*w.generation.prompt, *w.generation.token_ids] for w in wishes}
            seen.extend((texts[i], proposal.draft.token_ids) for i, proposal in found.items())
            return found

        drafter.propose = watched
        llm.generate(prompts, params)
        assert llm.loop.speculator is not None, "it failed"
    assert len(seen) > 20 and max(len(chain) for _, chain in seen) == 8
    same = [list(chain) == reference(text, len(chain)) for text, chain in seen[::4]]
    assert sum(same) >= len(same) - 1, "but for one tie"
