"""--kv-policy: engines that evict tokens say so, stay within their memory, and answer as the reference does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
from click.testing import CliRunner
from icc.compiler.cli import main
from icc.compiler.errors import UsageError
from icc.compiler.eviction import SIZES, read_eviction
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.interpret import interpret
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.runtime.commands.inspect import describe_engine
from icc.runtime.commands.memory import certify
from sizes import soak

LENGTH, STEP, BATCH = 400, 48, 2
STREAMING = "streaming:sinks=4,window=40"
LIMITS = {"max_seq_len": LENGTH, "max_step_tokens": STEP, "max_batch_size": BATCH}


@pytest.fixture(scope="module")
def model(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = tiny.tiny_configs()["llama"]
    config.max_position_embeddings = 64  # a policy that bounds distances may exceed it
    tiny.save_tiny(config, path)
    return path


@pytest.fixture(scope="module")
def streaming(model: Path) -> Path:
    return icc.compile(model, model.parent / "streaming.engine", target="native", kv_policy=STREAMING, **LIMITS)


def reference(model: Path, policy: str, ids: list[int]) -> np.ndarray:
    """The interpreter's logits [T, vocab] of all tokens."""
    kept = read_eviction(policy)
    graph = load_graph(model, LENGTH, policy=kept)
    for phase in (pipelines.canonicalize(), pipelines.attention(kept)):
        run_passes(graph, phase, PassContext())
    return interpret(graph, ids, list(range(len(ids)))).numpy()


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


IDS = np.random.default_rng(0).integers(3, 119, 300).tolist()


def test_streaming_answers_as_the_reference_far_beyond_the_models_positions(model: Path, streaming: Path) -> None:
    with icc.load(streaming, threads=2) as llm:
        assert difference(llm.logits(IDS), reference(model, STREAMING, IDS)) < 1e-4
        params = icc.SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
        [first] = llm.generate([IDS[:90]], params)
        teacher = llm.logits([*IDS[:90], *first.token_ids])[89:-1]
        assert np.argmax(teacher, axis=1).tolist() == list(first.token_ids)  # token by token equals in chunks
        loop = llm.loop
        again, other = loop.add(IDS[:90], params)[0], loop.add(IDS[90:200], params)[0]
        group, most, steps = loop.scheduler.kv.groups[0], 0, 0
        while loop.has_work():
            loop.step()
            steps += 1
            most = max(most, group.pool.num_blocks - group.pool.num_available)
            if steps % 30 == 0 and loop.scheduler.num_running > 1:
                loop.scheduler.queues.preempt(loop.scheduler.queues.running[-1])
        assert again.token_ids == list(first.token_ids) and again.num_cached_tokens > 0
        assert loop.scheduler.num_preemptions > 0 and len(other.token_ids) == 90
        sinks, window = 1, -(-40 // group.block_size) + 1
        assert most <= BATCH * (sinks + window) + STEP // group.block_size + BATCH < 2 * LENGTH // group.block_size


def test_an_engine_says_that_it_is_lossy(streaming: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((streaming / "engine.json").read_text())
    assert manifest["eviction"]["lossy"] is True and manifest["eviction"]["policy"] == STREAMING
    facts: Any = describe_engine(streaming)
    assert facts["eviction"]["tokens"] == 44 and "nothing of what lay between" in facts["eviction"]["loses"]
    assert facts["kv_cache"]["groups"][0]["keeps"] == "streaming of 40, 4 in front (lossy)"


def test_the_help_says_which_are_lossy() -> None:
    said = CliRunner().invoke(main, ["compile", "--help"]).output
    policies = said[said.index("--kv-policy:") :]
    assert all(f"{name}[" in policies for name in SIZES) and policies.count("lossy:") == len(SIZES)


def test_the_certificate_does_not_grow_with_the_length(streaming: Path) -> None:
    def blocks(length: int) -> int:
        found: Any = certify(streaming, 1, length)["kv_cache"]
        assert found[0]["keeps"] == "streaming 40 (4 in front; lossy)"
        return found[0]["blocks"]

    assert blocks(200) == blocks(400) < 400 // 32


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("lru", "is unknown"),
        ("streaming:sink=3", "no size of streaming"),
        ("streaming:window=8", "a window of 32"),
        ("h2o:budget=9", "a budget of at least 64"),
        ("snapkv:recent=2000", "1 to 896 can be the recent ones"),
    ],
)
def test_a_policy_that_is_none_is_refused(policy: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        icc.compile(tmp_path, tmp_path / "e", kv_policy=policy)


def test_what_no_gpu_kernel_does_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there are no kernels for --target h100"):
        icc.compile(tmp_path, tmp_path / "e", kv_policy="h2o", target="h100")
    with pytest.raises(UsageError, match="what guesses evict cannot be taken back"):
        icc.compile(tmp_path, tmp_path / "e", kv_policy="snapkv", spec="ngram")


@pytest.mark.parametrize("policy", soak("h2o:budget=64,recent=16", "snapkv:budget=64,recent=16"))
def test_what_is_chosen_by_attention(policy: str, tiny: Any, tmp_path: Path) -> None:
    """Equal tokens whatever else is in the batch, and after preemption; H2O's are those of the reference; bounded
    blocks."""
    model, config = tmp_path / "model", tiny.tiny_configs()["llama"]
    config.max_position_embeddings = LENGTH
    tiny.save_tiny(config, model)
    engine = icc.compile(model, tmp_path / "e", target="native", kv_policy=policy, **LIMITS)
    kept = policy.partition(":")[0]
    params = icc.SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    with icc.load(engine, threads=2) as llm:
        if kept == "h2o":
            ids = IDS[:190]
            assert difference(llm.logits(ids), reference(model, policy, ids)) < 1e-4
        prompts = [IDS[:100], IDS[100:150], IDS[30:160]]
        alone = [list(llm.generate([prompt], params)[0].token_ids) for prompt in prompts]
        loop = llm.loop
        together = [loop.add(prompt, params)[0] for prompt in prompts]
        group, steps, decoding = loop.scheduler.kv.groups[0], 0, 0
        while loop.has_work():
            loop.step()
            steps += 1
            loop.scheduler.check()
            if all(len(request.tokens) > 130 for request in loop.scheduler.queues.running):
                decoding = max(decoding, *(len(request.tables[0]) for request in loop.scheduler.queues.running), 0)
            if steps % 9 == 0 and loop.scheduler.num_running > 1:
                loop.scheduler.queues.preempt(loop.scheduler.queues.running[-1])
        assert [list(generation.token_ids) for generation in together] == alone
        assert loop.scheduler.num_preemptions > 0
        assert decoding * group.block_size <= (64 if kept == "h2o" else 64 + 62 + group.block_size)
