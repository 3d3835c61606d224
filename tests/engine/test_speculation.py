"""Speculation over compiled engines: the same tokens as without it, whatever is guessed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from icc.compiler.engine.directory import write_manifest
from icc.compiler.errors import HeadMismatch, UsageError
from icc.compiler.speculate.head_files import write_heads
from icc.runtime.commands.inspect import describe_engine
from icc.runtime.errors import EngineChangedError, EngineFormatError
from icc.runtime.executor.open import open_executor
from icc.runtime.format.load import read_manifest
from icc.runtime.format.manifest import ProgramEntry
from icc.runtime.llm import LLM
from icc.runtime.loading import load
from icc.runtime.requests.params import SamplingParams
from icc.runtime.speculate.speculator import Speculator
from msgspec.structs import replace
from planted_drafter import TreeDrafter
from sizes import soak

pytestmark = pytest.mark.slow

FAMILIES = ["gemma2", *soak("llama", "gpt_oss")]  # windows and softcaps; rotary; experts and sinks
PROMPTS = [[1, 5, 9, 5, 9, 5], [1, 7], [1, *range(10, 40)], [1, *range(10, 40)], [3, 4, 3, 4, 3, 4, 3]]


def speculating(llm: LLM, drafter: Any) -> LLM:
    llm.loop.speculator = Speculator(drafter, adaptive=False)
    return llm


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_without_speculation(compiled: Callable[..., Any], family: str) -> None:
    """Greedy and sampled; also with a cache so small that requests are preempted, and from the prefix cache."""
    engine = compiled(family, quant="rtn4").engine
    params = [SamplingParams(max_tokens=24 + i, temperature=[0.0, 1.5][i % 2], seed=i) for i in range(len(PROMPTS))]
    with load(engine, threads=1) as llm:
        plain = llm.generate(PROMPTS, params)
        kv_bytes = sum(group.block_bytes() for group in llm.engine.program.kv.groups) * 5
    truth = {tuple(prompt): one.token_ids for prompt, one in zip(PROMPTS, plain, strict=True)}
    for right, memory in ((0.8, None), (0.5, kv_bytes)):
        with load(engine, threads=2, kv_bytes=memory) as llm:
            speculating(llm, TreeDrafter(lambda generation: truth[generation.prompt], right))
            for _ in range(2):
                assert llm.generate(PROMPTS, params) == plain
            counts = llm.loop.speculator.counts
            assert 20 < counts.accepted < counts.guesses
            llm.loop.scheduler.check()
    with load(engine, threads=2, spec="lookahead:4,4,4") as llm:
        llm.loop.speculator.adaptive = False
        assert llm.generate(PROMPTS, params) == plain
        assert llm.loop.speculator.counts.guesses > 200


@pytest.fixture(scope="module")
def with_heads(compiled: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """(engine of a tiny llama with random heads, the folder of the heads)."""
    folder = tmp_path_factory.mktemp("heads")
    source = torch.Generator().manual_seed(0)
    tensors = {}
    for i in range(3):
        tensors[f"{i}.0.linear.weight"] = torch.randn(64, 64, generator=source) * 0.1
        tensors[f"{i}.0.linear.bias"] = torch.randn(64, generator=source) * 0.1
    write_heads(folder, tensors, {"medusa_num_heads": 3, "medusa_num_layers": 1})
    # steps shorter than the context with which a compile times them
    yield compiled("llama", spec=f"medusa:{folder}", max_step_tokens=48).engine, folder


def test_heads_choose_what_the_interpreter_says(with_heads: tuple[Path, Path], compiled: Callable[..., Any]) -> None:
    """The section of the heads, run on some of the logit rows of a step."""
    from icc.compiler.frontend.load import load_graph
    from icc.compiler.graph.interpret import interpret_outputs
    from icc.compiler.speculate.head_files import read_heads
    from icc.passes import pipelines
    from icc.passes.base import PassContext
    from icc.passes.manager import run_passes
    from icc.runtime.batch.scheduled import ScheduledBatch, ScheduledSequence

    engine, folder = with_heads
    graph = load_graph(compiled("llama").checkpoint)
    run_passes(graph, pipelines.canonicalize(), PassContext())
    run_passes(graph, pipelines.speculate(read_heads(folder), 0, "none", "int8"), PassContext())
    ids = [1, 5, 9, 33, 70, 2, 8]
    expected = interpret_outputs(graph, ids)["medusa.drafts"].numpy()
    with load(engine, threads=2) as llm:
        llm.executor.step(ScheduledBatch((ScheduledSequence(1, tuple(ids), 0, ((0,),), len(ids)),)))
        for rows in ([3], [0, 6], range(7)):
            found = llm.executor.run("medusa", {"draft_rows": np.array(rows)})["drafts"]
            assert np.array_equal(found[:, :, 0], expected[list(rows), :, 0])


def test_an_engine_with_heads_gives_what_one_without_gives(
    with_heads: tuple[Path, Path], compiled: Callable[..., Any]
) -> None:
    params = SamplingParams(max_tokens=40)
    with load(compiled("llama").engine, threads=1) as llm:
        plain = llm.generate(PROMPTS, params)
    for spec in ("medusa", "ngram", "suffix", "lookahead:3,3,3", "none"):
        with load(with_heads[0], threads=1, spec=spec) as llm:
            if llm.loop.speculator is not None:
                llm.loop.speculator.adaptive = False
            assert llm.generate(PROMPTS, params) == plain
            assert (llm.loop.speculator is None) == (spec == "none")
            if spec not in ("medusa", "none"):
                assert llm.loop.speculator.counts.accepted > 0


# one KV group; two groups, one of which the exit's layers use
@pytest.mark.parametrize("family", [*soak("llama"), "gemma2"])
def test_the_first_layers_and_a_second_engine_guess(compiled: Callable[..., Any], family: str) -> None:
    """Self-speculation after one of two layers, and a draft engine that is the model itself: all its guesses are
    right."""
    engine = compiled(family, spec="layer-skip:1").engine
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with load(compiled(family).engine, threads=1) as llm:
        plain = llm.generate(PROMPTS, params)
    for spec in (None, f"draft:{compiled(family).engine}"):
        with load(engine, threads=1, spec=spec) as llm:
            assert llm.loop.speculator.drafter.name == ("layer-skip" if spec is None else "draft")
            llm.loop.speculator.adaptive = False
            assert llm.generate(PROMPTS, params) == plain
            counts = llm.loop.speculator.counts
            assert counts.accepted == counts.guesses > 20 if spec else counts.guesses > 20


def test_another_program_of_the_engine_guesses(compiled: Callable[..., Any], tmp_path: Path) -> None:
    """One engine with two programs: the model itself, and a 4-bit version that drafts for it."""
    main, draft = compiled("llama").engine, compiled("llama", quant="rtn4").engine
    engine = shutil.copytree(main, tmp_path / "both.engine")
    shutil.copytree(draft / "kernels", engine / "draft" / "kernels")
    for name in ("program.json", "weights.safetensors"):
        shutil.copy(draft / name, engine / "draft" / name)
    manifest, entry = read_manifest(engine), read_manifest(draft).main
    libraries = [replace(library, path=f"draft/{library.path}") for library in entry.libraries]
    entry = ProgramEntry("draft/program.json", "draft/weights.safetensors", libraries)
    (engine / "engine.json").unlink()
    write_manifest(engine, replace(manifest, programs={**manifest.programs, "draft": entry}))
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with load(engine, threads=1) as llm:
        plain = llm.generate(PROMPTS, params)
        assert open_executor(llm.engine, "main").vocab_size == 120
        with pytest.raises(EngineFormatError, match="no program 'vision'"):
            open_executor(llm.engine, "vision")
    with load(engine, threads=1, spec="draft") as llm:
        llm.loop.speculator.adaptive = False
        assert llm.generate(PROMPTS, params) == plain
        assert 0 < llm.loop.speculator.counts.accepted < llm.loop.speculator.counts.guesses
    assert describe_engine(engine)["programs"] == ["main", "draft"]
    with pytest.raises(UsageError, match="--spec draft: the engine has no program 'draft'"):
        load(main, spec="draft")
    with (engine / "draft" / "weights.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    with pytest.raises(EngineChangedError, match=r"draft/weights\.safetensors has changed"):
        load(engine)


@pytest.mark.parametrize("family", [*soak("llama"), "gemma2"])
def test_an_early_exit_gives_the_logits_of_the_first_layers(compiled: Callable[..., Any], family: str) -> None:
    from icc.compiler.frontend.load import load_graph
    from icc.compiler.graph.interpret import interpret_outputs
    from icc.passes import pipelines
    from icc.passes.base import PassContext
    from icc.passes.manager import run_passes
    from icc.runtime.batch.scheduled import ScheduledBatch, ScheduledSequence
    from icc.runtime.executor.cpu.device import CpuDevice
    from icc.runtime.executor.player import Player

    found = compiled(family, spec="layer-skip:1")
    graph = load_graph(found.checkpoint)
    run_passes(graph, [*pipelines.canonicalize(), *pipelines.speculate((), 1, "none", "int8")], PassContext())
    ids = [1, 5, 9, 33, 70, 2, 8]
    expected = interpret_outputs(graph, ids)["exit.logits"].numpy()
    with load(found.engine, threads=1, spec="none") as llm:
        executor = Player(CpuDevice(llm.engine, 2, section="exit"))
        tables = ((0,),) * len(executor.groups)
        executor.step(ScheduledBatch((ScheduledSequence(1, tuple(ids[:4]), 0, tables, 4),)))
        got = executor.step(ScheduledBatch((ScheduledSequence(1, tuple(ids[4:]), 4, tables, 3),)))
        assert np.abs(got - expected[4:]).max() < 1e-4 * np.abs(expected).max()
        executor.close()


def test_the_report_and_the_program_say_what_was_chosen(with_heads: tuple[Path, Path]) -> None:
    with load(with_heads[0], threads=1) as llm:
        found = llm.engine.program.speculation
    assert (found.drafter, found.heads, found.ranks) == ("medusa", 3, 8)
    assert [tree.batch for tree in found.trees] == [1, 2, 4, 8, 16]
    assert b'"expected_tokens"' in (with_heads[0] / "report.json").read_bytes()


def test_mistakes_are_refused_in_words(compiled: Callable[..., Any], with_heads: tuple[Path, Path]) -> None:
    with pytest.raises(HeadMismatch, match=r"linear.weight has hidden size 64, the model has 60"):
        compiled("llama-odd", spec=f"medusa:{with_heads[1]}")
    with pytest.raises(UsageError, match="--spec 'medusa' is not known"):
        compiled("llama", spec="medusa")
    with pytest.raises(UsageError, match="has no Medusa heads"):
        load(compiled("llama").engine, spec="medusa")
    with pytest.raises(UsageError, match="--spec 'psychic' is unknown"):
        load(compiled("llama").engine, spec="psychic")
