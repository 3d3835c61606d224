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
            # room that is kept for second choices is lost to the chain where the executor finds the first choice alone
            assert llm.loop.speculator.counts.accepted > (5 if drafter.trees else 10)
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


def check_acceptance(
    engine: Path, name: str, prompt: list[int], params: SamplingParams, reference: Callable[[list[int], int], list[int]]
) -> None:
    """As many guesses of a greedy request are accepted as there would be with `reference(text, count)`, 8 at a time at
    most."""
    with load(engine, threads=1) as llm:
        [found] = always(llm, name).generate([prompt], [params])
        assert llm.loop.speculator is not None, "it failed"
        counts = llm.loop.speculator.counts
    tokens, done, expected = list(found.token_ids), 1, [0, 0]  # guesses, and those that are right
    while (room := len(tokens) - done - 1) > 0:
        guesses = reference([*prompt, *tokens[:done]], min(room, 8))
        right = next((i for i, guess in enumerate(guesses) if guess != tokens[done + i]), len(guesses))
        expected = [expected[0] + len(guesses), expected[1] + right]
        done += right + 1
    assert [counts.guesses, counts.accepted] == expected and expected[1] > 0
