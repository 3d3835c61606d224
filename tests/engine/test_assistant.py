"""--spec assistant:DIR: an assistant that reads the model's keys and values makes transformers' guesses, and changes no
token."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import icc
import pytest
import torch
from assistant_models import Reference, save_pair
from guessing import PROMPTS, check_acceptance, check_chains, check_ranks, check_tokens, compiled_once, without_guesses
from icc.compiler.errors import CheckpointError, UsageError
from icc.runtime.format.load import open_engine
from icc.runtime.loading import load

pytestmark = pytest.mark.slow


class Pair(NamedTuple):
    """An engine compiled with an assistant, and its sources."""

    engine: Path
    folder: Path
    reference: Reference


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("assistant")
    reference = save_pair("shared", path)
    engine = compiled_once("assistant", path / "model", f"assistant:{path / 'drafter'}")
    return Pair(engine, path, reference)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[Any]:
    return without_guesses(pair.engine)


def test_it_guesses_for_ranks(pair: Pair, plain: list[Any]) -> None:
    spec = f"assistant:{pair.folder / 'drafter'}"
    check_ranks(pair.engine.stem, pair.folder / "model", spec, plain, tensor_parallel=2)


def test_tokens_are_those_without_it(pair: Pair, plain: list[Any]) -> None:
    """Greedy and sampled tokens; greedy ones are also those of transformers with the assistant."""
    check_tokens(pair.engine, "assistant", plain)
    reference = pair.reference
    reference.assistant.generation_config.num_assistant_tokens = 4
    theirs = reference.target.generate(
        torch.tensor([PROMPTS[0]]), assistant_model=reference.assistant, max_new_tokens=36, do_sample=False,
        eos_token_id=None,
    )  # fmt: skip
    assert list(plain[0].token_ids) == theirs[0, len(PROMPTS[0]) :].tolist()


def test_guesses_are_those_of_transformers(pair: Pair) -> None:
    check_chains(pair.engine, "assistant", pair.reference.chain)


def test_acceptance_is_theirs(pair: Pair) -> None:
    """A greedy request accepts as many guesses as the reference's would."""
    check_acceptance(pair.engine, "assistant", 0, pair.reference.chain)


def test_it_has_no_cache_of_its_own(pair: Pair) -> None:
    """The engine's KV layers are the model's; weights that the assistant shares with the model are stored once."""
    with closing(open_engine(pair.engine)) as engine:
        program = engine.program
    assert [section.name for section in program.sections] == ["tap", "draft_layer"]
    assert program.speculation.drafter == "assistant"
    assert sum(len(group.layers) for group in program.kv.groups) == 4
    own = {name for name in program.weights if name.startswith("draft_layer.")}
    assert "draft_layer.pre_projection.weight" in own and not any("embedding.weight" in name for name in own)
    assert not any("k_proj" in name or "v_proj" in name for name in own)


def test_where_there_is_none(compiled: Any, tmp_path: Path) -> None:
    """An engine compiled without an assistant, and a missing folder. Nothing is written."""
    llama, output = compiled("llama"), tmp_path / "x.engine"
    with pytest.raises(UsageError, match="--spec assistant: the engine has no layer that guesses"):
        load(llama.engine, spec="assistant")
    with pytest.raises(CheckpointError, match=r"--spec assistant:.*is not a directory"):
        icc.compile(llama.checkpoint, output, target="native", spec="assistant:/not/there")
    assert not output.exists()


def test_refusals(pair: Pair, compiled: Any, tmp_path: Path) -> None:
    """An assistant for another model; options that do not work with it. Nothing is written."""
    llama, output = compiled("llama"), tmp_path / "x.engine"
    checkpoint, spec = pair.folder / "model", f"assistant:{pair.folder / 'drafter'}"
    with pytest.raises(UsageError, match="the model has none"):
        icc.compile(llama.checkpoint, output, target="native", spec=spec)
    with pytest.raises(UsageError, match=r"--spec assistant.* does not work with --pipeline-parallel"):
        icc.compile(checkpoint, output, target="native", spec=spec, pipeline_parallel=2)
    assert not output.exists()
