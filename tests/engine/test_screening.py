"""Engines that screen their head for greedy batches: the same tokens, and whole logits for requests that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import icc
import numpy as np
import pytest
from icc.compiler.backends.cpu import backend
from icc.runtime.batch.scheduled import ScheduledBatch
from icc.runtime.executor.player import Player
from icc.runtime.requests.params import SamplingParams

SAMPLE = Path(__file__).parents[2] / "samples" / "pystd"
PROMPTS = ["def fib(n):", "import os\n", "class Shape:\n    def __init__(self", 'raise ValueError("']
GREEDY = SamplingParams(max_tokens=40, temperature=0)

Step = Callable[[Player, ScheduledBatch], list[int]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The sample with an early exit; its head is small, so screening has to be allowed explicitly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "CPU_PROFILE", replace(backend.CPU_PROFILE, screened_bytes=0))
        path = tmp_path_factory.mktemp("screening") / "sample.engine"
        yield icc.compile(SAMPLE, path, target="native", quant="rtn4", spec="layer-skip:2")


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The share of logits that each greedy step skipped; filled as steps run."""
    shares: list[float] = []
    step: Step = Player.step_greedy

    def counted(self: Player, batch: ScheduledBatch) -> list[int]:
        tokens = step(self, batch)
        logits = self.device.logits[: len(tokens)]
        assert tokens == logits.argmax(axis=1).tolist()
        shares.append(float(np.isneginf(logits).mean()))
        return tokens

    monkeypatch.setattr(Player, "step_greedy", counted)
    return shares


@pytest.mark.parametrize("spec", ["none", "ngram", "layer-skip"])
def test_tokens_are_those_of_the_whole_logits(
    engine: Path, monkeypatch: pytest.MonkeyPatch, left_out: list[float], spec: str
) -> None:
    with icc.load(engine, threads=2, spec=spec) as llm:
        one = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]
        together = [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]
    assert max(left_out) > 0.3
    monkeypatch.setattr(Player, "step_greedy", lambda self, batch: self.step(batch).argmax(axis=1).tolist())
    with icc.load(engine, threads=2, spec="none") as llm:
        whole = [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]
    assert one == together == whole


def test_ranks_screen_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest logit of a row is the maximum over its parts' largest."""
    monkeypatch.setattr(backend, "CPU_PROFILE", replace(backend.CPU_PROFILE, screened_bytes=0))
    ranks = icc.compile(SAMPLE, tmp_path / "two.engine", target="native", quant="rtn4", tensor_parallel=2)
    (source,) = (ranks / "kernels").glob("*.cpp")
    assert "if (gemm_screened(" in source.read_text()
    with icc.load(ranks, threads=2, spec="none") as llm:
        screened = [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]
        monkeypatch.setattr(Player, "step_greedy", lambda self, batch: self.step(batch).argmax(axis=1).tolist())
        assert [done.token_ids for done in llm.generate(PROMPTS, GREEDY)] == screened


def test_who_looks_at_more_than_the_largest_logit_gets_all(engine: Path, left_out: list[float]) -> None:
    looks = [
        replace(GREEDY, logprobs=2),
        replace(GREEDY, repetition_penalty=1.2),
        replace(GREEDY, min_tokens=3),
        replace(GREEDY, logit_bias={5: 3.0}),
        SamplingParams(max_tokens=8, temperature=0.8, seed=1),
    ]
    with icc.load(engine, threads=1, spec="none") as llm:
        alone = [llm.generate(PROMPTS[:1], params)[0] for params in looks]
        assert np.isfinite(llm.logits([1, 5, 9])).all()
        assert left_out == []
        beside = llm.generate([PROMPTS[0], PROMPTS[1]], [looks[0], GREEDY])[0]
    assert beside.token_ids == alone[0].token_ids and beside.logprobs == alone[0].logprobs
