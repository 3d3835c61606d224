"""--spec eagle:DIR: an EAGLE-3 drafter of each published layout guesses as its forward says, and changes no token."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import icc
import pytest
from eagle_models import CASES, Drafter, Reference, save_eagle, target_of
from guessing import check_chains, check_tokens
from icc.compiler.errors import CheckpointError, UsageError
from icc.runtime.commands.inspect import describe_engine
from icc.runtime.format.load import open_engine
from icc.runtime.loading import load
from icc.runtime.requests.params import SamplingParams

pytestmark = pytest.mark.slow

PROMPTS = [[1, 5, 9, 5, 9, 5], [1, 7], [1, *range(10, 80)], [1, *range(10, 80)], [3, 4, 3, 4, 3, 4, 3]]
PARAMS = [
    SamplingParams(max_tokens=36 + i, temperature=[0.0, 1.5][i == 1], seed=i, ignore_eos=True)
    for i in range(len(PROMPTS))
]


class Pair(NamedTuple):
    """An engine compiled with a drafter, and what it was made of."""

    engine: Path
    checkpoint: Path
    folder: Path
    drafter: Drafter
    target: Any


@pytest.fixture(scope="module", params=["specforge", "speculators"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path, case = tmp_path_factory.mktemp("eagle"), request.param
    target = target_of(CASES[case], path / "model")
    save_eagle(CASES[case], target, path / "drafter")
    shared = Path(os.environ["ICC_COMPILED_ONCE"])
    engine = shared / f"eagle-{case}.engine"
    with (shared / "eagle.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not engine.exists():
            spec = f"eagle:{path / 'drafter'}"
            icc.compile(path / "model", engine, target="native", spec=spec, max_step_tokens=48)
    return Pair(engine, path / "model", path / "drafter", CASES[case], target)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> Iterator[list[Any]]:
    with load(pair.engine, threads=1, spec="none") as llm:
        yield llm.generate(PROMPTS, PARAMS)


def test_tokens_are_those_without_it(pair: Pair, plain: list[Any]) -> None:
    """Greedy and sampled."""
    check_tokens(pair.engine, "eagle", PROMPTS, PARAMS, plain)


def test_it_guesses_only_where_that_pays(pair: Pair, plain: list[Any]) -> None:
    """As users have it: with accounts, which decide request by request."""
    with load(pair.engine, threads=1) as llm:
        assert llm.loop.speculator is not None and llm.loop.speculator.adaptive
        assert llm.generate(PROMPTS, PARAMS) == plain


def test_guesses_are_those_of_the_published_forward(pair: Pair) -> None:
    reference = Reference(pair.drafter, pair.target, pair.folder)
    check_chains(pair.engine, "eagle", PROMPTS[:3], PARAMS[:3], reference.chain)


def test_what_the_engine_says_of_it(pair: Pair) -> None:
    """Its weights count; what the model has is stored once."""
    with closing(open_engine(pair.engine)) as engine:
        program = engine.program
    assert [section.name for section in program.sections] == ["tap", "draft_layer"]
    assert program.speculation.drafter == "eagle"
    own = {name for name in program.weights if name.startswith("draft_layer.")}
    assert {"draft_layer.fc", "draft_layer.lm_head.weight"} <= own
    assert any("embed_tokens" in name for name in own) == ("embed_tokens" in pair.drafter.own)
    assert "draft_layer" in str(describe_engine(pair.engine))
    assert "draft-layer" in (pair.engine / "report.json").read_text()


def test_what_it_was_compiled_with_is_recorded_by_content(pair: Pair, tmp_path: Path) -> None:
    """No path is in the engine, and a compile of other weights needs the directory again."""
    facts = json.loads((pair.engine / "report.json").read_text())["options"]
    assert facts["spec"].startswith("eagle:") and str(pair.folder) not in facts["spec"]
    with pytest.raises(UsageError, match="was compiled with --spec") as error:
        icc.refit(pair.engine, pair.checkpoint, tmp_path / "x.engine")
    assert "--spec eagle:DIR" in str(error.value.hint)


def test_refusals(pair: Pair, compiled: Any, tmp_path: Path) -> None:
    """An engine compiled without; a drafter of another model; what does not work with it. Nothing is written."""
    llama, output = compiled("llama"), tmp_path / "x.engine"
    spec = f"eagle:{pair.folder}"
    with pytest.raises(UsageError, match="--spec eagle: the engine has no layer that guesses"):
        load(llama.engine, spec="eagle")
    with pytest.raises(UsageError, match="--spec mtp: the engine has no layer that guesses"):
        load(pair.engine, spec="mtp")
    with pytest.raises(CheckpointError, match=r"--spec eagle:.*is not a directory"):
        icc.compile(pair.checkpoint, output, target="native", spec="eagle:/not/there")
    with pytest.raises(CheckpointError, match="the model has"):
        icc.compile(llama.checkpoint, output, target="native", spec=spec)
    for given, what in (
        ({"quant": "rtn4", "rotate": True}, "--rotate"),
        ({"adapters": "2x16"}, "--adapters"),
        ({"tensor_parallel": 2}, "several ranks"),
    ):
        with pytest.raises(UsageError, match=rf"--spec eagle.* does not work with {what}"):
            icc.compile(pair.checkpoint, output, target="native", spec=spec, **given)
    assert not output.exists()
