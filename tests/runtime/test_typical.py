"""Typical acceptance: the paper's criterion, a warning, and no effect unless it is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from icc.runtime.batch.scheduled import Draft
from icc.runtime.cli.commands import main
from icc.runtime.errors import UsageError
from icc.runtime.format.manifest import Manifest
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeDevice, FakeExecutor
from icc.runtime.requests.params import SamplingParams
from icc.runtime.requests.sampler import Sampler
from icc.runtime.speculate.speculator import Speculator
from icc.runtime.speculate.typical import TypicalAcceptance, read_acceptance
from oracle_drafters import Fixed

SMALL = 6
TREE = Draft((3, 0, 4, 1, 2, 5), (-1, -1, 1, 1, 0, 3))
ALL = [(0,), (1,), (0, 4), (1, 2), (1, 3), (1, 3, 5)]  # its paths


def reference(draft: Draft, logits: np.ndarray, temperature: float, epsilon: float, delta: float) -> tuple[int, ...]:
    """The paper's criterion for every path of the tree, in float64. Returns the longest accepted path, the likeliest of
    equally long ones."""
    best: tuple[int, float, tuple[int, ...]] = (0, 0.0, ())
    for path in ALL:
        score, row = 0.0, 0
        for guess in path:
            scaled = logits[row].astype(np.float64) / temperature
            p = np.exp(scaled - scaled.max())
            p /= p.sum()
            entropy = -sum(x * math.log(x) for x in p)
            chance = p[draft.token_ids[guess]]
            if not chance > min(epsilon, delta * math.exp(-entropy)):
                break
            score, row = score + math.log(chance), guess + 1
        else:
            best = max(best, (len(path), score, path))
    return best[2]


@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.3, 0.6), (0.01, 1.0), (1.0, 0.05)])
def test_paths_are_those_of_the_papers_criterion(epsilon: float, delta: float) -> None:
    source = np.random.default_rng(0)
    lengths = []
    for _ in range(300):
        logits = source.normal(0, source.choice([0.3, 1.0, 3.0]), (len(TREE) + 1, SMALL)).astype(np.float32)
        temperature = float(source.choice([0.5, 1.0, 1.5]))
        sampler = Sampler(SamplingParams(temperature=temperature, seed=1), [], SMALL)
        walk = TypicalAcceptance(epsilon, delta).follow(TREE, logits, sampler, ())
        expected = reference(TREE, logits, temperature, epsilon, delta)
        assert walk.accepted == expected
        tokens = [sample.token_id for sample in walk.samples if sample is not None]
        assert tokens[:-1] == [TREE.token_ids[guess] for guess in expected] and len(tokens) == len(expected) + 1
        assert walk.row == (expected[-1] + 1 if expected else 0)
        lengths.append(len(expected))
    assert len(set(lengths)) > 2, "the cases were meant to differ"


def test_an_end_token_ends_the_path_and_nan_accepts_nothing() -> None:
    logits = np.zeros((len(TREE) + 1, SMALL), dtype=np.float32)
    params = SamplingParams(temperature=1.0, seed=1, logprobs=0)
    walk = TypicalAcceptance().follow(TREE, logits, Sampler(params, [], SMALL), {1})
    # all tokens are equally likely: the longest path is 0, 1, 5, whose second token ends the text
    assert walk.accepted == (1,) and walk.row == 2
    assert [s.token_id for s in walk.samples if s] == [0, 1]
    assert walk.samples[0] is not None and walk.samples[0].logprob is not None
    assert walk.samples[0].logprob.logprob == pytest.approx(-math.log(SMALL))
    logits[0, 2] = np.nan
    assert TypicalAcceptance().follow(TREE, logits, Sampler(params, [], SMALL), ()).samples == (None,)


def test_what_is_outside_of_the_nucleus_is_not_accepted() -> None:
    logits = np.array([[4.0, 3.9, 3.0, 0.0, 0.0, 0.0]] * 3, dtype=np.float32)
    draft = Draft((2, 1), (-1, -1))
    typical = TypicalAcceptance(0.05, 1.0)
    free = Sampler(SamplingParams(temperature=1.0, seed=1), [], SMALL)
    narrow = Sampler(SamplingParams(temperature=1.0, top_k=1, seed=1), [], SMALL)
    assert typical.follow(draft, logits, free, ()).accepted == (1,)  # the likelier of two equally long paths
    assert typical.follow(draft, logits, narrow, ()).accepted == ()


class Table(FakeExecutor):
    """A model whose logits depend on the last two tokens."""

    def _logits(self, context: list[int]) -> np.ndarray:
        return np.random.default_rng([SMALL, *context[-2:]]).normal(0, 1, SMALL).astype(np.float32)


class TableDevice(FakeDevice, Table):
    pass


@pytest.mark.parametrize("kind", [Table, TableDevice])
def test_it_accepts_more_samples_and_changes_neither_greedy_nor_penalized_output(
    toy_manifest: Callable[..., Manifest], kind: type[FakeExecutor]
) -> None:
    def run(typical: TypicalAcceptance | None, **options: Any) -> tuple[float, list[Any]]:
        executor = kind(vocab_size=SMALL, num_blocks=200, max_step_tokens=64, max_logit_rows=64)
        llm = LLM(
            toy_manifest(vocab_size=SMALL, eos_token_ids=[]),
            executor,
            speculator=Speculator(Fixed(TREE), adaptive=False),
        )
        assert llm.loop.speculator is not None and llm.loop.speculator.typical is None, "it is off by itself"
        llm.loop.speculator.typical = typical
        params = [SamplingParams(max_tokens=40, seed=seed, **options) for seed in range(4)]
        tokens = [one.token_ids for one in llm.generate([[1, 2]] * 4, params)]
        return llm.loop.speculator.counts.tokens_per_step, tokens

    lossless, typical = run(None, temperature=1.0), run(TypicalAcceptance(), temperature=1.0)
    assert typical[0] > lossless[0] and typical[1] != lossless[1]
    assert all(len(tokens) == 40 for tokens in typical[1])
    for options in ({"temperature": 0.0}, {"temperature": 1.0, "presence_penalty": 0.5}):
        assert run(TypicalAcceptance(), **options) == run(None, **options)


def test_the_option() -> None:
    assert read_acceptance("lossless") is None
    assert read_acceptance("typical") == TypicalAcceptance(0.09, 0.3)
    assert read_acceptance("typical:0.2,0.5") == TypicalAcceptance(0.2, 0.5)
    for text in ("", "greedy", "typical:0.1,0.2,0.3", "typical:0,0.3", "typical:nan,1", "lossless:1,1"):
        with pytest.raises(UsageError, match="--spec-accept"):
            read_acceptance(text)


def test_the_command_warns_and_needs_a_drafter(make_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(make_engine())
    run = ["run", root, "--ids", "1,2", "--max-tokens", "4", "--temperature", "1"]
    assert main([*run, "--spec", "ngram", "--spec-accept", "typical"]) == 0
    assert capsys.readouterr().err.count("lossy") == 1
    assert main([*run, "--spec", "ngram"]) == 0
    assert "lossy" not in capsys.readouterr().err
    assert main([*run, "--spec-accept", "typical"]) == 2
    assert "there is no drafter" in capsys.readouterr().err
    assert main([*run, "--spec-accept", "typical:9"]) == 2
    assert main([*run, "--swap-gib", "-1"]) == 2
    assert "--swap-gib" in capsys.readouterr().err
    assert main([*run, "--swap-gib", "1"]) == 2
    assert "for GPU engines" in capsys.readouterr().err
