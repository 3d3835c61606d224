"""Adapters with drafters: the base model makes the guesses, and each request's adapter verifies them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
import torch
from icc import SamplingParams
from icc.compiler.speculate.head_files import write_heads
from icc.compiler.speculate.tree import tree_of
from icc.runtime.format.speculation import Speculation
from icc.runtime.llm import LLM
from icc.runtime.query import adapted
from icc.runtime.speculate.medusa import MedusaDrafter
from icc.runtime.speculate.speculator import Speculator
from peft_models import save_adapter
from planted_drafter import TreeDrafter

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 5, 9, 5, 9, 5], [1, 7], [1, *range(10, 30)], [1, *range(10, 30)], [3, 4, 3, 4, 3, 4, 3]]
NAMES = ["one", None, "two", None, "one"]
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def adapters(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    kind = {"r": 4, "target_modules": PROJECTIONS}
    return {n: save_adapter(model("llama"), folder / n, seed, 0.1, **kind) for seed, n in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random Medusa heads of the tiny llama."""
    folder, source = tmp_path_factory.mktemp("heads"), torch.Generator().manual_seed(0)
    tensors = {}
    for number in range(2):
        tensors[f"{number}.0.linear.weight"] = torch.randn(64, 64, generator=source) * 0.1
        tensors[f"{number}.0.linear.bias"] = torch.randn(64, generator=source) * 0.1
    write_heads(folder, tensors, {"medusa_num_heads": 2, "medusa_num_layers": 1})
    return folder


@pytest.fixture(scope="module")
def plain(engine: Make, adapters: dict[str, Path]) -> list[list[int]]:
    """The answers without guesses."""
    with icc.load(engine("llama", adapters="2x16")) as llm:
        return answers(llm, adapters)


def answers(llm: LLM, adapters: dict[str, Path]) -> list[list[int]]:
    for name, path in adapters.items():
        llm.load_adapter(name, path)
    if llm.loop.speculator is not None:
        llm.loop.speculator.adaptive = False  # guess at every step, even if it does not pay
    return [list(one.token_ids) for one in llm.generate(PROMPTS, PARAMS, adapter=NAMES)]


@pytest.mark.parametrize("spec", ["draft", "layer-skip"])
def test_a_second_engine_and_the_first_layers_guess(
    engine: Make, adapters: dict[str, Path], plain: list[list[int]], spec: str
) -> None:
    used = engine("llama", adapters="2x16", **({"spec": "layer-skip:1"} if spec == "layer-skip" else {}))
    with icc.load(used, spec=f"draft:{engine('llama')}" if spec == "draft" else None) as llm:
        assert answers(llm, adapters) == plain
        counts = llm.loop.speculator.counts  # type: ignore[union-attr]
        assert counts.guesses > 20 and (counts.accepted > 0 or spec != "draft")  # one of two layers may be wrong


def test_heads_guess(engine: Make, adapters: dict[str, Path], heads: Path, plain: list[list[int]]) -> None:
    """A tree of 5 guesses at every step, from untrained heads."""
    tree = tree_of([[0.5] * 8] * 2, 16, lambda batch, guesses: 1.0, 5)
    with icc.load(engine("llama", adapters="2x16", **_medusa(heads)), spec="none") as llm:
        speculation = Speculation("medusa", 2, 8, [[0.5] * 8] * 2, [tree], 0.0)
        llm.loop.speculator = Speculator(MedusaDrafter(llm.executor, speculation), adaptive=False)  # type: ignore[arg-type]
        assert answers(llm, adapters) == plain
        assert llm.loop.speculator.counts.guesses > 200


def _medusa(heads: Path) -> dict[str, Any]:
    """Compile options. Steps are shorter than the context from which on the compile would time them."""
    return {"spec": f"medusa:{heads}", "max_step_tokens": 48}


def test_trees_are_verified_by_the_adapter(engine: Make, adapters: dict[str, Path], plain: list[list[int]]) -> None:
    """Trees with branches; most of the guesses are right."""
    truth = {(tuple(prompt), name): found for prompt, name, found in zip(PROMPTS, NAMES, plain, strict=True)}
    assert len({tuple(found) for found in truth.values()}) == len(truth)
    right = {prompt: truth[prompt, name] for prompt, name in truth if PROMPTS.count(list(prompt)) == 1}
    with icc.load(engine("llama", adapters="2x16"), threads=2) as llm:
        drafter = TreeDrafter(lambda generation: right.get(tuple(generation.prompt), plain[2]), 0.8)
        llm.loop.speculator = Speculator(drafter, adaptive=False)
        assert answers(llm, adapters) == plain
        assert 20 < llm.loop.speculator.counts.accepted < llm.loop.speculator.counts.guesses


def test_heads_read_what_the_step_with_adapters_left(
    engine: Make, adapters: dict[str, Path], heads: Path, model: Callable[[str], Path]
) -> None:
    """The heads choose the same tokens as in an engine with the adapter merged into it; after a step without adapters,
    the same as in an engine without any."""
    chosen: list[list[np.ndarray]] = []
    for options, names in (({"adapters": "2x16"}, ["one", None]), ({"lora": adapters["one"]}, [None]), ({}, [None])):
        with icc.load(engine("llama", **options, **_medusa(heads)), spec="none") as llm:
            if "adapters" in options:
                llm.load_adapter("one", adapters["one"])
            found: list[np.ndarray] = []
            for name in names:
                task, generation = llm.begin(adapted(llm.prompting.queries([PROMPTS[2]], PARAMS), [name])[0])
                while not generation.token_ids:
                    llm.driver.step()
                found.append(llm.executor.run("medusa", {"draft_rows": np.array([0])})["drafts"].copy())  # type: ignore[attr-defined]
                llm.driver.abort(task)
            chosen.append(found)
    assert np.array_equal(chosen[0][0], chosen[1][0]) and np.array_equal(chosen[0][1], chosen[2][0])
    assert not np.array_equal(chosen[0][0], chosen[0][1])
