"""Checks for engines with any kind of draft layer."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import icc
from icc.runtime.executor import sampling
from icc.runtime.format.load import open_engine
from icc.runtime.llm import LLM
from icc.runtime.loading import load
from icc.runtime.requests.params import SamplingParams

PROMPTS = [[1, 5, 9, 5, 9, 5], [1, 7], [1, *range(10, 80)], [1, *range(10, 80)], [3, 4, 3, 4, 3, 4, 3]]
PARAMS = [
    SamplingParams(max_tokens=36 + i, temperature=[0.0, 1.5][i == 1], seed=i, ignore_eos=True)
    for i in range(len(PROMPTS))
]


def compiled_once(name: str, model: Path, spec: str, **options: Any) -> Path:
    """The engine of a checkpoint and a drafter, compiled once for all processes; name: identifies the options too."""
    shared = Path(os.environ["ICC_COMPILED_ONCE"])
    engine = shared / f"{name}.engine"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not engine.exists():
            icc.compile(model, engine, target="native", spec=spec, max_step_tokens=48, **options)
    return engine


def without_guesses(engine: Path) -> list[Any]:
    """The completions of PROMPTS without a drafter."""
    with load(engine, threads=1, spec="none") as llm:
        return llm.generate(PROMPTS, PARAMS)


def always(llm: LLM, name: str) -> LLM:
    """Make the speculator guess at every step, so that failures are not hidden; returns `llm`."""
    assert llm.loop.speculator is not None and llm.loop.speculator.drafter.name == name
    llm.loop.speculator.adaptive = False
    return llm


def check_tokens(engine: Path, name: str, plain: list[Any]) -> None:
    """Check several requests at once, twice, so that prompts are found in the cache; then with a cache so small that
    requests are preempted, and with second choices beside the chains, for which executors need more than the largest
    logit."""
    with closing(open_engine(engine)) as opened:
        small = sum(group.block_bytes() for group in opened.program.kv.groups) * 8
    for memory in (None, small):
        trees = memory is not None
        whole_logits = mock.patch.object(sampling, "greedy", lambda executor: None) if trees else nullcontext()
        with whole_logits, load(engine, threads=2, kv_bytes=memory) as llm:
            drafter = always(llm, name).loop.speculator.drafter
            drafter.trees, drafter.seconds.share = trees, 0.9
            for _ in range(2):
                assert llm.generate(PROMPTS, PARAMS) == plain
            assert llm.loop.speculator is not None
            assert llm.loop.speculator.counts.accepted > 10
            llm.loop.scheduler.check()


def check_ranks(name: str, model: Path, spec: str, plain: list[Any], **options: Any) -> None:
    """Check an engine of several ranks with a drafter: the tokens of one rank, and some right guesses."""
    ways = "-".join(f"{option}{count}" for option, count in options.items())
    drafter = spec.partition(":")[0]
    with load(compiled_once(f"{name}-{ways}", model, spec, **options), threads=2) as llm:
        assert always(llm, drafter).generate(PROMPTS, PARAMS) == plain
        assert llm.loop.speculator is not None and llm.loop.speculator.counts.accepted > 0
        llm.loop.scheduler.check()


def check_adaptive(engine: Path, plain: list[Any]) -> None:
    """Check the default: the speculator decides for each request whether guesses pay."""
    with load(engine, threads=1) as llm:
        assert llm.loop.speculator is not None and llm.loop.speculator.adaptive
        assert llm.generate(PROMPTS, PARAMS) == plain


def check_chains(engine: Path, name: str, reference: Callable[[list[int], int], list[int]]) -> None:
    """Check each chain against `reference(text, count)`: with prompts in one step and in several, alone and in batches,
    after accepted guesses."""
    with load(engine, threads=1) as llm:
        drafter, seen = always(llm, name).loop.speculator.drafter, []
        propose, drafter.trees = drafter.propose, False

        def watched(wishes: Any) -> Any:
            found = propose(wishes)
            texts = {w.generation.request_id: [*w.generation.prompt, *w.generation.token_ids] for w in wishes}
            seen.extend((texts[i], proposal.draft.token_ids) for i, proposal in found.items())
            return found

        drafter.propose = watched
        llm.generate(PROMPTS[:3], PARAMS[:3])
        assert llm.loop.speculator is not None, "it failed"
    assert len(seen) > 20 and max(len(chain) for _, chain in seen) == 8
    same = [list(chain) == reference(text, len(chain)) for text, chain in seen[::4]]
    assert sum(same) >= len(same) - 1, "but for one tie"


def check_acceptance(engine: Path, name: str, number: int, reference: Callable[[list[int], int], list[int]]) -> None:
    """Check that a greedy request of prompt `number` makes and accepts as many guesses as with `reference(text,
    count)`, at most 8 at a time."""
    prompt, params = PROMPTS[number], PARAMS[number]
    with load(engine, threads=1) as llm:
        [found] = always(llm, name).generate([prompt], [params])
        assert llm.loop.speculator is not None, "it failed"
        counts = llm.loop.speculator.counts
    tokens, done, expected = list(found.token_ids), 1, [0, 0]  # guesses, right guesses
    while (room := len(tokens) - done - 1) > 0:
        guesses = reference([*prompt, *tokens[:done]], min(room, 8))
        right = next((i for i, guess in enumerate(guesses) if guess != tokens[done + i]), len(guesses))
        expected = [expected[0] + len(guesses), expected[1] + right]
        done += right + 1
    assert [counts.guesses, counts.accepted] == expected and expected[1] > 0
