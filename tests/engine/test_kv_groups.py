"""Engines with window groups: beyond several windows, in chunks, with prefix hits and preemption, in bounded memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import msgspec
import numpy as np
import pytest
from icc.runtime.commands.inspect import describe_engine
from icc.runtime.executor.cpu.device import CpuDevice
from icc.runtime.executor.player import Player
from icc.runtime.format.load import open_engine
from icc.runtime.kv.policy import POLICIES
from icc.runtime.kv.sequence import NO_BLOCK
from icc.runtime.llm import LLM
from kv_policies import Sinks
from sizes import soak

LENGTH, WINDOW, STEP, BATCH = 480, 40, 48, 4
SINKS = 5
NEW = 260
LIMITS = {"max_seq_len": LENGTH, "max_step_tokens": STEP, "max_batch_size": BATCH}
GREEDY = icc.SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
NAMES = ["gemma2", *soak("mistral", "qwen2-window")]


@pytest.fixture(scope="module")
def made(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Compiles a tiny configuration with a longer context and window; returns the engine and transformers' model."""
    known: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in known:
            config = tiny.tiny_configs()[name]
            config.max_position_embeddings, config.sliding_window = 512, WINDOW
            path = tmp_path_factory.mktemp("model")
            model = tiny.save_tiny(config, path)
            known[name] = icc.compile(path, path.parent / f"{path.name}.engine", target="native", **LIMITS), model
        return known[name]

    return make


def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    long = random.integers(3, 119, 190).tolist()
    return [long, [*long[:150], *random.integers(3, 119, 20).tolist()], long[:30], random.integers(3, 119, 90).tolist()]


class Watch:
    """Before each step, fills every free block with NaN, and records how many blocks are held."""

    def __init__(self, llm: LLM, preempt_every: int = 0) -> None:
        self.llm, self.step, self.every = llm, llm.executor.step_greedy, preempt_every
        self.most = [0] * len(llm.executor.groups)
        self.steps = 0
        self.holes: set[bool] = set()
        llm.executor.step_greedy = llm.executor.step = self  # type: ignore[method-assign]

    def __call__(self, batch: Any) -> np.ndarray:
        scheduler, device = self.llm.loop.scheduler, self.llm.executor.device
        for number, group in enumerate(scheduler.kv.groups):
            self.most[number] = max(self.most[number], group.pool.num_blocks - group.pool.num_available)
            for block in group.pool._free:
                for offset, nbytes in device.cache.block_places(number, block):
                    ctypes.memset(device._kv.address + offset, 0xFF, nbytes)
        self.holes |= {table[0] == NO_BLOCK for sequence in batch.sequences for table in sequence.block_tables[-1:]}
        self.steps += 1
        return self.step(batch)


def generate(llm: LLM, preempt_every: int = 0) -> list[Any]:
    generations = [llm.loop.add(prompt, GREEDY)[0] for prompt in prompts()]
    scheduler, steps = llm.loop.scheduler, 0
    while llm.loop.has_work():
        llm.loop.step()
        steps += 1
        if preempt_every and steps % preempt_every == 0 and scheduler.num_running > 1:
            scheduler.queues.preempt(scheduler.queues.running[-1])
    scheduler.check()
    assert scheduler.kv.is_idle
    return generations


@pytest.mark.parametrize("name", NAMES)
def test_tokens_beyond_several_windows_are_the_models(name: str, made: Any, tiny: Any) -> None:
    engine, model = made(name)
    with icc.load(engine, threads=2) as llm:
        groups = llm.executor.groups
        assert len(groups) == (1 if name == "mistral" else 2)
        assert sorted(type(group.policy).__name__ for group in groups) == ["KeepAll", "Window"][-len(groups) :]
        watch = Watch(llm)
        found = generate(llm)
        for prompt, generation in zip(prompts(), found, strict=True):
            logits = tiny.reference_logits(model, [*prompt, *generation.token_ids]).numpy()[len(prompt) - 1 : -1]
            best = logits.max(axis=1)
            chosen = logits[np.arange(NEW), list(generation.token_ids)]
            assert np.abs(best - chosen).max() < 1e-3  # ties within rounding
        for group, most in zip(groups, watch.most, strict=True):
            held = BATCH * group.policy.most_blocks(LENGTH, group.block_size)
            assert most <= held + STEP // group.block_size + BATCH
        tokens = [generation.token_ids for generation in found]
        again = generate(llm)  # from the prefix cache, as far as it reaches
        assert [generation.token_ids for generation in again] == tokens
        assert sum(generation.num_cached_tokens for generation in again) > 0
        disturbed = generate(llm, preempt_every=7)
        assert [generation.token_ids for generation in disturbed] == tokens
        assert llm.loop.scheduler.num_preemptions > 10


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_as_computed(name: str, made: Any) -> None:
    """`inspect` shows the bytes of each group, and the engine takes no more; those of a window do not grow with the
    length."""
    engine, _ = made(name)
    facts: Any = describe_engine(engine)["kv_cache"]
    with icc.load(engine) as llm:
        cache = llm.executor.device.cache
        assert cache.nbytes == facts["bytes_full_batch"] == sum(g["bytes_full_batch"] for g in facts["groups"])
        assert cache.group_bytes == [group["bytes_full_batch"] for group in facts["groups"]]
    for group in facts["groups"]:
        size, per_token = group["block_size"], group["bytes_per_token"]
        blocks = group["bytes_full_batch"] / (per_token * size)
        if group["keeps"] == "all":
            assert blocks == BATCH * -(-LENGTH // size)
        else:
            assert group["keeps"] == f"window of {WINDOW}"
            window = (WINDOW + size - 2) // size + 1
            assert blocks == BATCH * window + -(-STEP // size) + BATCH < BATCH * -(-LENGTH // size)


def test_little_memory_is_divided_and_changes_nothing(made: Any) -> None:
    engine, _ = made("gemma2")
    with icc.load(engine) as llm:
        expected = [generation.token_ids for generation in generate(llm)]
        layout, limits = llm.engine.program.kv, llm.manifest.limits
    one, batch = (layout.blocks_needed(limits, count) for count in (1, BATCH))
    least = sum(count * group.block_bytes() for count, group in zip(one, layout.groups, strict=True))
    with pytest.raises(icc.IccError, match=r"needs .* MiB"):
        icc.load(engine, kv_bytes=least - 1)
    with icc.load(engine, kv_bytes=least * 3 // 2) as llm:
        counts = [group.num_blocks for group in llm.executor.groups]
        assert all(low <= count < high for low, count, high in zip(one, counts, batch, strict=True))
        watch = Watch(llm)
        assert [generation.token_ids for generation in generate(llm)] == expected
        assert watch.most[0] <= counts[0] and llm.loop.scheduler.num_preemptions > 0


@pytest.mark.soak
def test_a_window_as_long_as_the_text_is_none(made: Any, tiny: Any, tmp_path: Path) -> None:
    tiny.save_tiny(tiny.tiny_configs()["gemma2"], tmp_path / "model")
    engine = icc.compile(tmp_path / "model", tmp_path / "e", target="native", max_seq_len=8, max_step_tokens=8)
    [group] = open_engine(engine).program.kv.groups
    assert (group.keeps, len(group.layers)) == ("all", 2)


def test_a_group_of_another_kind(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "sinks", lambda size: Sinks(SINKS, size))
    engine, _ = made("gemma2")
    with icc.load(engine) as llm:
        expected = [generation.token_ids for generation in generate(llm)]
    opened = open_engine(engine)
    groups = [
        msgspec.structs.replace(group, keeps="sinks") if group.keeps == "window" else group
        for group in opened.program.kv.groups
    ]
    kv = msgspec.structs.replace(opened.program.kv, groups=tuple(groups))
    opened = msgspec.structs.replace(opened, program=msgspec.structs.replace(opened.program, kv=kv))
    with LLM(opened.manifest, Player(CpuDevice(opened, 2))) as llm:
        window = next(n for n, group in enumerate(llm.executor.groups) if group.policy == Sinks(SINKS, WINDOW))
        tables: list[tuple[int, ...]] = []
        step = llm.executor.step_greedy

        def watched(batch: Any) -> np.ndarray:
            tables.extend(sequence.block_tables[window] for sequence in batch.sequences)
            return step(batch)

        llm.executor.step_greedy = llm.executor.step = watched  # type: ignore[method-assign]
        assert [generation.token_ids for generation in generate(llm, preempt_every=40)] == expected
        assert all(table[0] != NO_BLOCK for table in tables)
        assert any(table[1] == NO_BLOCK for table in tables if len(table) > 1)
