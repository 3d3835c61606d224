"""Every drafter on the CUDA executor over a fake driver: plain decoding's tokens, and the heads' choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from building import GpuEngine, build
from fake_cuda import FakeDriver
from icc import SamplingParams
from icc.compiler.graph.interpret import interpret_outputs
from icc.compiler.speculate.head_files import write_heads
from icc.runtime.batch.scheduled import ScheduledBatch, ScheduledSequence
from icc.runtime.executor.cuda.device import CudaDevice
from icc.runtime.executor.cuda.driver import Cuda
from icc.runtime.executor.player import Player
from icc.runtime.format.manifest import Limits
from icc.runtime.llm import LLM
from icc.runtime.speculate.drafter import Drafter
from icc.runtime.speculate.medusa import MedusaDrafter
from icc.runtime.speculate.second_engine import EngineDrafter
from icc.runtime.speculate.speculator import Speculator

Make = Callable[..., Player[CudaDevice]]
LIMITS = Limits(max_seq_len=40, max_batch_size=3, max_step_tokens=20)
PROMPTS = [[5, 9, 5, 9, 5], [3, 4, 5, 6, 7, 8, 9, 3, 4, 5]]
PARAMS = [SamplingParams(max_tokens=5, temperature=t, seed=3, ignore_eos=True) for t in (1.0, 0.0)]


@pytest.fixture(scope="module")
def built(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> GpuEngine:
    """A tiny llama with random draft heads and an early exit after one of its layers."""
    model, heads = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("heads")
    tiny.save_tiny(tiny.tiny_configs()["llama"], model)
    source = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(*size, generator=source) * 0.1
        for i in range(2)
        for name, size in ((f"{i}.0.linear.weight", (64, 64)), (f"{i}.0.linear.bias", (64,)))
    }
    write_heads(heads, tensors, {"medusa_num_heads": 2, "medusa_num_layers": 1})
    return build(model, "none", LIMITS, heads=heads, exit_layers=1)


@pytest.fixture(scope="module")
def plain(built: GpuEngine) -> list[Any]:
    with built.llm() as llm:
        return llm.generate(PROMPTS, PARAMS)


def open_device(built: GpuEngine) -> tuple[Make, FakeDriver]:
    """A function that makes executors of one engine on one fake device, and that device's driver."""
    driver, engine = FakeDriver(built.objects()), built.engine()
    cuda = Cuda(bindings=driver)
    return lambda section="": Player(CudaDevice(engine, cuda=cuda, section=section)), driver


def drafter_of(name: str, make: Make, executor: Player[CudaDevice], built: GpuEngine) -> Drafter:
    if name == "medusa":
        assert built.program.speculation is not None
        return MedusaDrafter(executor, built.program.speculation)
    before = len(executor.device.cuda.uploaded)
    exits = make("exit")
    assert len(executor.device.cuda.uploaded) == before == 1, "the weights were meant to be shared"
    return EngineDrafter(exits, LIMITS.max_seq_len, name=name)


@pytest.mark.parametrize("name", ["medusa", "layer-skip"])
def test_tokens_are_those_of_plain_decoding(name: str, built: GpuEngine, plain: list[Any]) -> None:
    make, driver = open_device(built)
    executor = make()
    drafter = drafter_of(name, make, executor, built)
    with LLM(built.manifest, executor, speculator=Speculator(drafter, adaptive=False, max_guesses=3)) as llm:
        found = llm.generate(PROMPTS, PARAMS)
        counts = llm.loop.speculator.counts  # type: ignore[union-attr]
        assert counts.guesses >= 3
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert not driver.live and not driver.memory


def drafts(executor: Player[CudaDevice], rows: list[int]) -> np.ndarray:
    return executor.run("medusa", {"draft_rows": np.array(rows, np.int32)})["drafts"]


def test_heads_choose_what_the_reference_says(built: GpuEngine) -> None:
    """After rows of a chunk, and after padded decodes; run twice, so that a graph is used."""
    ids = [1, 5, 9, 33, 70, 2, 8]
    expected = interpret_outputs(built.graph, ids)["medusa.drafts"].numpy()
    executor = open_device(built)[0]()
    executor.step(ScheduledBatch((ScheduledSequence(1, tuple(ids), 0, ((0,),), len(ids)),)))
    for rows in ([3], [0, 6], [3], [1, 2, 5]):
        assert np.array_equal(drafts(executor, rows)[:, :, 0], expected[rows][:, :, 0])
    executor.step(ScheduledBatch((ScheduledSequence(1, tuple(ids[:6]), 0, ((0,),), 0),)))
    decodes = (ScheduledSequence(1, (ids[6],), 6, ((0,),), 1),)
    for _ in range(2):
        executor.step(ScheduledBatch(decodes))
        assert np.array_equal(drafts(executor, [0])[0, :, 0], expected[6, :, 0])
    executor.close()


def test_steps_that_come_again_become_graphs_and_old_ones_are_given_up(
    built: GpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from icc.runtime.executor.cuda import graphs

    monkeypatch.setattr(graphs, "_MOST", 2)
    make, driver = open_device(built)
    driver.dry = True
    executor = make()

    def launched(tokens: int) -> tuple[int, int]:
        before = driver.graph_launches, driver.eager_launches
        executor.step(ScheduledBatch((ScheduledSequence(1, (5,) * tokens, 0, ((0, 1),), 1),)))
        return driver.graph_launches - before[0], driver.eager_launches - before[1]

    assert launched(3)[0] == 0 and launched(3) == launched(3) == (1, 0)
    assert launched(4)[0] == 0 and launched(5)[0] == 0  # two more sizes: the graph of the first is dropped
    assert launched(3)[0] == 0 and launched(3) == (1, 0)
    executor.close()
    assert not driver.live
