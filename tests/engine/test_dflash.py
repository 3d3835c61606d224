"""--spec dflash:DIR: a drafter of blocks makes the guesses of published code, and changes no token."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import icc
import pytest
from dflash_models import BLOCK, CASES, MASK, Reference, save_dflash, save_target
from guessing import (
    check_acceptance,
    check_adaptive,
    check_chains,
    check_ranks,
    check_tokens,
    compiled_once,
    without_guesses,
)
from icc.compiler.errors import CheckpointError, UsageError
from icc.runtime.format.load import open_engine
from icc.runtime.loading import load

pytestmark = pytest.mark.slow


class Pair(NamedTuple):
    """An engine compiled with a drafter, and its sources."""

    engine: Path
    folder: Path
    reference: Reference


@pytest.fixture(scope="module", params=["zlab", "transformers"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path, case = tmp_path_factory.mktemp("dflash"), request.param
    target = save_target(path / "model")
    save_dflash(CASES[case], target, path / "drafter")
    engine = compiled_once(f"dflash-{case}", path / "model", f"dflash:{path / 'drafter'}")
    return Pair(engine, path, Reference(CASES[case], target, path / "drafter"))


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[Any]:
    return without_guesses(pair.engine)


def test_it_guesses_for_ranks(pair: Pair, plain: list[Any]) -> None:
    spec = f"dflash:{pair.folder / 'drafter'}"
    check_ranks(pair.engine.stem, pair.folder / "model", spec, plain, tensor_parallel=2)


def test_tokens_are_those_without_it(pair: Pair, plain: list[Any]) -> None:
    """Greedy and sampled tokens."""
    check_tokens(pair.engine, "dflash", plain)


def test_it_guesses_only_where_that_pays(pair: Pair, plain: list[Any]) -> None:
    check_adaptive(pair.engine, plain)


def test_guesses_are_those_of_published_code(pair: Pair) -> None:
    """Guesses of whole blocks, wherever the blocks of the cache end."""
    check_chains(pair.engine, "dflash", pair.reference.chain)


def test_acceptance_is_theirs(pair: Pair) -> None:
    """A greedy request accepts as many guesses as the reference's would."""
    check_acceptance(pair.engine, "dflash", 4, pair.reference.chain)


def test_what_the_engine_says_of_it(pair: Pair) -> None:
    """Some blocks of the cache are reserved for guesses; weights that the drafter shares with the model are stored
    once."""
    with closing(open_engine(pair.engine)) as engine:
        program = engine.program
    assert (program.speculation.drafter, program.speculation.block, program.speculation.mask_token) == (
        "dflash", BLOCK, MASK,
    )  # fmt: skip
    own = {name for name in program.weights if name.startswith("draft_layer.")}
    assert "draft_layer.fc" in own and not any("embed" in name or "lm_head" in name for name in own)
    with load(pair.engine, threads=1) as llm:
        player: Any = llm.executor
        for group, spare in zip(player.groups, player.spare_blocks, strict=True):
            assert len(spare) * group.block_size >= BLOCK and spare.start == group.num_blocks


def test_refusals(pair: Pair, compiled: Any, tmp_path: Path) -> None:
    """An engine compiled without a drafter; a drafter for another model; options that do not work with it. Nothing is
    written."""
    llama, output = compiled("llama"), tmp_path / "x.engine"
    checkpoint, spec = pair.folder / "model", f"dflash:{pair.folder / 'drafter'}"
    with pytest.raises(UsageError, match="--spec dflash: the engine has no layer that guesses"):
        load(llama.engine, spec="dflash")
    with pytest.raises(CheckpointError, match=r"--spec dflash:.*is not a directory"):
        icc.compile(checkpoint, output, target="native", spec="dflash:/not/there")
    with pytest.raises((CheckpointError, UsageError), match="the model"):
        icc.compile(llama.checkpoint, output, target="native", spec=spec)
    with pytest.raises(UsageError, match=r"--spec dflash.* does not work with --pipeline-parallel"):
        icc.compile(checkpoint, output, target="native", spec=spec, pipeline_parallel=2)
    assert not output.exists()
