"""Preemption by swap: KV from host memory gives the tokens of an undisturbed run, also with pending moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import GpuEngine, build
from fake_cuda import FakeDriver
from icc import SamplingParams
from icc.runtime.batch.scheduled import Draft, ScheduledBatch
from icc.runtime.errors import CapacityError
from icc.runtime.executor.cuda.device import CudaDevice
from icc.runtime.executor.cuda.driver import Cuda
from icc.runtime.executor.cuda.host import choose_host_blocks
from icc.runtime.executor.player import Player
from icc.runtime.executor.swap import copies, runs
from icc.runtime.format.kv import KVGroup, KVLayer, KVLayout, KVMemory
from icc.runtime.format.manifest import Limits
from icc.runtime.llm import LLM
from icc.runtime.speculate.speculator import Speculator
from planted_drafter import PlantedDrafter
from sizes import soak

LIMITS = Limits(max_seq_len=28, max_batch_size=2, max_step_tokens=16)
PROMPTS = [[5, 9, 23, 7, 11], [5, 9, 23, 7, 40, 41, 42]]
PARAMS = [SamplingParams(max_tokens=7, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 1.0)]


@pytest.fixture(scope="module")
def built(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> GpuEngine:
    model = tmp_path_factory.mktemp("model")
    config = tiny.tiny_configs()["llama"]
    config.num_hidden_layers = 1  # the interpreter is slow
    tiny.save_tiny(config, model)
    return build(model, "none", LIMITS, block_size=4)


@pytest.fixture(scope="module")
def plain(built: GpuEngine) -> list[tuple[int, ...]]:
    with built.llm() as llm:
        return [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]


def moved(wrong: int, right: int, then: int) -> Draft:
    """A wrong guess first, so that the right ones move when they are accepted."""
    return Draft((wrong, right, then), (-1, -1, 1))


def executor_of(kind: str, built: GpuEngine) -> Any:
    if kind == "interpret":
        return built.executor(host_blocks=12)
    # memory for a sequence and a half, so that requests are swapped
    nbytes = built.program.kv.groups[0].block_bytes() * 12
    driver = Cuda(bindings=FakeDriver(built.objects()))
    return Player(CudaDevice(built.engine(), nbytes, driver, swap_bytes=nbytes))


@pytest.mark.parametrize(("kind", "guess"), [("interpret", True), ("cuda", False), *soak(("cuda", True))])
def test_what_was_swapped_out_and_in_gives_the_same_tokens(
    kind: str, guess: bool, built: GpuEngine, plain: list[tuple[int, ...]]
) -> None:
    """Before each step one request in turn loses its blocks, and later returns."""
    executor = executor_of(kind, built)
    assert executor.groups[0].host_blocks == 12
    seen: list[ScheduledBatch] = []
    with LLM(built.manifest, executor) as llm:
        if guess:
            truth = dict(zip(map(tuple, PROMPTS), plain, strict=True))
            llm.loop.speculator = Speculator(PlantedDrafter(truth, moved), adaptive=False)
        scheduler, schedule = llm.loop.scheduler, llm.loop.scheduler.schedule

        def disturbed(*given: Any) -> ScheduledBatch:
            if scheduler.queues.running:
                scheduler.queues.preempt(scheduler.queues.running[len(seen) % len(scheduler.queues.running)])
            seen.append(schedule(*given))
            return seen[-1]

        scheduler.schedule = disturbed  # type: ignore[method-assign]
        scheduler.schedule_ahead = lambda: None  # type: ignore[method-assign]  # so that every step is disturbed
        found = [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]
    assert found == plain
    assert scheduler.num_swaps == scheduler.num_preemptions > 2
    assert any(upkeep.swap_ins for batch in seen for upkeep in batch.upkeep)
    if guess:
        both = [upkeep for batch in seen for upkeep in batch.upkeep if upkeep.moves and upkeep.swap_outs]
        assert both, "moves were meant to wait when blocks go"


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["interpret", "cuda"])
def test_states_are_swapped_beside_blocks(kind: str, tiny: Any, tmp_path: Path) -> None:
    """A delta rule, a convolution and attention: a request that loses its states and blocks continues with the same
    tokens."""
    tiny.save_tiny(tiny.tiny_configs()["qwen3_next-delta_rule"], tmp_path)
    built = build(tmp_path, "none", LIMITS, block_size=4)
    with built.llm() as llm:
        plain = [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]
    if kind == "interpret":
        executor: Any = built.executor(host_blocks=12)
    else:  # memory for a sequence and a half
        needs = built.program.kv.blocks_needed(LIMITS, 1)
        sizes = [group.block_bytes() for group in built.program.kv.groups]
        nbytes = sum(size * (count + count // 2) for size, count in zip(sizes, needs, strict=True))
        driver = FakeDriver(built.objects())
        executor = Player(CudaDevice(built.engine(), nbytes, Cuda(bindings=driver), swap_bytes=4 * nbytes))
    swapped: set[int] = set()
    with LLM(built.manifest, executor) as llm:
        scheduler, schedule, steps = llm.loop.scheduler, llm.loop.scheduler.schedule, 0

        def disturbed(*given: Any) -> ScheduledBatch:
            nonlocal steps
            steps += 1
            if scheduler.queues.running:
                scheduler.queues.preempt(scheduler.queues.running[steps % len(scheduler.queues.running)])
            batch = schedule(*given)
            swapped.update(group for group, upkeep in enumerate(batch.upkeep) if upkeep.swap_ins)
            return batch

        scheduler.schedule = disturbed  # type: ignore[method-assign]
        scheduler.schedule_ahead = lambda: None  # type: ignore[method-assign]
        found = [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]
    assert found == plain and scheduler.num_swaps > 2
    assert swapped == set(range(len(built.program.kv.groups))), "states and blocks were meant to come back"


def test_the_cuda_executor_swaps_when_its_memory_runs_out(built: GpuEngine, plain: list[tuple[int, ...]]) -> None:
    block = built.program.kv.groups[0].block_bytes()
    driver = FakeDriver(built.objects())
    executor = Player(CudaDevice(built.engine(), 7 * block, Cuda(bindings=driver), swap_bytes=3 * block))
    prompts = [[*range(3, 15)], [*range(5, 17)]]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with built.llm() as llm:
        expected = llm.generate(prompts, params)
    with LLM(built.manifest, executor) as llm:
        assert llm.generate(prompts, params) == expected
        assert llm.loop.scheduler.num_swaps > 0, "the blocks were meant to run out"
    assert not driver.live and not driver.memory


def test_host_memory_is_taken_only_where_the_cache_can_run_out(built: GpuEngine) -> None:
    layout = built.program.kv
    block = layout.groups[0].block_bytes()

    def chosen(blocks: int, nbytes: int | None) -> tuple[int, ...]:
        return choose_host_blocks(KVMemory(layout, (blocks,)), (16,), nbytes).num_blocks

    assert chosen(16, None) == chosen(16, 99 * block) == (0,)
    assert chosen(15, None) == (16,)  # gibibytes hold everything
    assert chosen(15, 3 * block + 1) == (3,)
    assert chosen(15, 0) == (0,)


def test_pinning_that_fails_says_what_to_do(built: GpuEngine) -> None:
    driver = FakeDriver(built.objects())
    driver.fail = "cuMemAllocHost"
    block = built.program.kv.groups[0].block_bytes()
    with pytest.raises(CapacityError, match=r"cannot pin 0\.00 GiB of host memory") as caught:
        CudaDevice(built.engine(), 9 * block, Cuda(bindings=driver))
    assert "--swap-gib" in str(caught.value.hint)
    driver.fail = None
    assert not driver.live and not driver.memory


def test_every_layer_of_a_block_comes_back() -> None:
    """Layers of different sizes in two groups, swapped into different blocks."""
    first = {0: KVLayer(1, 8, 8), 2: KVLayer(3, 16, 8), 3: KVLayer(2, 8, 8)}
    layout = KVLayout((KVGroup(4, "f16", first), KVGroup(8, "f16", {1: KVLayer(1, 8, 16)}, "window", 5)))
    cache, kept = KVMemory(layout, (6, 7)), KVMemory(layout, (4, 5))
    memory = np.random.default_rng(0).integers(0, 255, cache.nbytes, dtype=np.uint8)
    host = np.zeros(kept.nbytes, dtype=np.uint8)

    def content(group: int, block: int) -> list[bytes]:
        return [memory[at : at + nbytes].tobytes() for at, nbytes in cache.block_places(group, block)]

    before = [[content(group, block) for block in range(6)] for group in range(2)]
    for group in range(2):
        for at, to, nbytes in copies(cache, kept, group, ((5, 0), (1, 1), (2, 2), (0, 3))):
            host[to : to + nbytes] = memory[at : at + nbytes]
    memory[:] = 0
    for group in range(2):
        for to, at, nbytes in copies(cache, kept, group, ((0, 3), (1, 0), (2, 1), (3, 2))):
            memory[to : to + nbytes] = host[at : at + nbytes]
        assert [content(group, block) for block in range(4)] == [before[group][block] for block in (0, 5, 1, 2)]
        assert not any(map(any, (*content(group, 4), *content(group, 5))))


def test_neighbours_travel_together() -> None:
    assert list(runs([])) == []
    assert list(runs([(3, 0), (4, 1), (5, 2), (6, 4), (6, 5), (2, 6)])) == [(3, 0, 3), (6, 4, 1), (6, 5, 1), (2, 6, 1)]
