"""Engines of every format version that is still read, as files: they open, and their answers are those of the time when
they were written.

golden/write_engines.py wrote them, with what they answered, when their version was the current one.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from icc.runtime.cli.facts import as_text
from icc.runtime.commands.inspect import describe_engine
from icc.runtime.errors import EngineChangedError, EngineVersionError
from icc.runtime.executor.walk import Walker
from icc.runtime.format.digest import encode_sealed
from icc.runtime.format.footprint import LOGITS_BYTES, batch_limits
from icc.runtime.format.isa import cpu_flags
from icc.runtime.format.kv import KVMemory
from icc.runtime.format.load import open_engine, read_manifest
from icc.runtime.loading import load
from icc.runtime.requests.params import SamplingParams

ARCHIVES = sorted((Path(__file__).parent / "golden").glob("engines.v*.tar.xz"))
has_avx2 = pytest.mark.skipif(not cpu_flags() >= {"avx2", "fma", "f16c"}, reason="the engines' kernels need AVX2")


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda archive: archive.name.split(".")[1])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the engines of one version, and answers.json."""
    folder = tmp_path_factory.mktemp("written")
    with tarfile.open(request.param) as archive:
        archive.extractall(folder, filter="data")
    return folder


def asked(folder: Path) -> Any:
    return json.loads((folder / "answers.json").read_text())


@has_avx2
@pytest.mark.parametrize(("name", "drafter"), [("llama", "medusa"), ("gemma2", "layer-skip")])
def test_it_answers_as_it_did(written: Path, name: str, drafter: str) -> None:
    """The answers are checked with the guesses of its draft heads or its early exit, and without guesses."""
    facts, params = asked(written), SamplingParams(max_tokens=20, ignore_eos=True, temperature=2.0, seed=1)
    tokens, logits = facts["answers"][f"{name}.engine"]
    for spec in (None, "none"):
        with load(written / f"{name}.engine", threads=1, spec=spec) as llm:
            if spec is None:
                llm.loop.speculator.adaptive = False
            assert [list(one.token_ids) for one in llm.generate(facts["prompts"], params)] == tokens
            assert np.abs(llm.logits(facts["prompts"][-1])[-1] - logits).max() < 1e-5 * np.abs(logits).max()
            assert llm.loop.speculator is None or llm.loop.speculator.drafter.name == drafter
            assert llm.loop.speculator is None or llm.loop.speculator.counts.guesses > 20


@has_avx2
def test_pairs_have_the_scores_that_they_had(written: Path) -> None:
    """The model has token types."""
    facts = asked(written)
    with load(written / "bert.engine", threads=1) as llm:
        found = llm.rerank(*facts["pair"])
    assert [[one.index, pytest.approx(one.score, abs=1e-5)] for one in found] == facts["answers"]["bert.engine"]


def test_a_plan_for_a_gpu_opens(written: Path) -> None:
    """None of its kernels runs here, but all arguments of all launches are found."""
    engine = open_engine(written / "h100.engine")
    program = engine.program
    assert program.plan is not None and program.speculation is not None and program.speculation.heads == 2
    limits = batch_limits(program, engine.manifest.limits, LOGITS_BYTES["cuda"])
    cache = KVMemory(program.kv, program.kv.blocks_needed(engine.manifest.limits, 1))
    walker = Walker(program, program.plan, cache, limits)
    for phase in program.plan.phases:
        for section in ("", *(section.name for section in program.sections)):
            launches = walker.launches(phase, section)
            assert launches and all(launch.object in program.plan.objects for launch, _ in launches)
    engine.close()


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "h100"])
def test_it_is_described(written: Path, name: str) -> None:
    facts = describe_engine(written / f"{name}.engine")
    assert facts["layers"] == (1 if name == "bert" else 2) and facts["weights_bytes"] and as_text(facts)


@pytest.mark.parametrize("file", ["kernels/avx2.so", "weights.safetensors", "program.json"])
def test_a_changed_file_is_found(written: Path, tmp_path: Path, file: str) -> None:
    engine = shutil.copytree(written / "llama.engine", tmp_path / "x.engine")
    content = bytearray((engine / file).read_bytes())
    content[-1] ^= 1
    (engine / file).write_bytes(content)
    with pytest.raises(EngineChangedError, match=f"{file} has changed"):
        open_engine(engine)


def test_a_later_version_is_refused_in_a_line(written: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(written / "llama.engine", tmp_path / "x.engine")
    (engine / "engine.json").write_bytes(
        encode_sealed(msgspec.structs.replace(read_manifest(engine), format_version=99))
    )
    with pytest.raises(EngineVersionError, match="version 99 is not supported") as caught:
        open_engine(engine)
    assert "\n" not in str(caught.value)
