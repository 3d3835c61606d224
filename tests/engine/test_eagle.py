"""--spec eagle:DIR: an EAGLE-3 drafter of each published layout makes the guesses of its forward, and changes no
token."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import icc
import pytest
from eagle_models import CASES, Drafter, Reference, save_eagle, target_of
from guessing import check_adaptive, check_chains, check_ranks, check_tokens, compiled_once, without_guesses
from icc.compiler.errors import CheckpointError, UsageError
from icc.runtime.commands.inspect import describe_engine
from icc.runtime.format.load import open_engine
from icc.runtime.loading import load

pytestmark = pytest.mark.slow


class Pair(NamedTuple):
    """An engine compiled with a drafter, and its sources."""

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
    engine = compiled_once(f"eagle-{case}", path / "model", f"eagle:{path / 'drafter'}")
    return Pair(engine, path / "model", path / "drafter", CASES[case], target)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[Any]:
    return without_guesses(pair.engine)


def test_tokens_are_those_without_it(pair: Pair, plain: list[Any]) -> None:
    """Greedy and sampled tokens."""
    check_tokens(pair.engine, "eagle", plain)


@pytest.mark.parametrize("more", [{}, {"sequence_parallel": True}])
def test_it_guesses_for_ranks(more: dict[str, bool], pair: Pair, plain: list[Any]) -> None:
    options: dict[str, Any] = {"tensor_parallel": 2, **more}
    check_ranks(pair.engine.stem, pair.checkpoint, f"eagle:{pair.folder}", plain, **options)


def test_it_guesses_only_where_that_pays(pair: Pair, plain: list[Any]) -> None:
    check_adaptive(pair.engine, plain)


def test_guesses_are_those_of_the_published_forward(pair: Pair) -> None:
    reference = Reference(pair.drafter, pair.target, pair.folder)
    check_chains(pair.engine, "eagle", reference.chain)


def test_what_the_engine_says_of_it(pair: Pair) -> None:
    """The engine has the drafter's own weights; those that it shares with the model are stored once."""
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
    """No path is in the engine, and a refit to other weights needs the drafter's directory again."""
    facts = json.loads((pair.engine / "report.json").read_text())["options"]
    assert facts["spec"].startswith("eagle:") and str(pair.folder) not in facts["spec"]
    with pytest.raises(UsageError, match="was compiled with --spec") as error:
        icc.refit(pair.engine, pair.checkpoint, tmp_path / "x.engine")
    assert "--spec eagle:DIR" in str(error.value.hint)


def test_refusals(pair: Pair, compiled: Any, tmp_path: Path) -> None:
    """An engine compiled without a drafter; a drafter for another model; options that do not work with it. Nothing is
    written."""
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
        ({"pipeline_parallel": 2}, "--pipeline-parallel"),
    ):
        with pytest.raises(UsageError, match=rf"--spec eagle.* does not work with {what}"):
            icc.compile(pair.checkpoint, output, target="native", spec=spec, **given)
    assert not output.exists()
