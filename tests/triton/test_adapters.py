"""Adapters on GPUs: the plans of steps with and without them, interpreted, and over a fake driver."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from building import GpuEngine, build
from fake_cuda import OnDisk
from fake_ranks import FakeNode
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.merging import merge_adapter
from icc.compiler.program.steps.linear import ExpertProduct
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.runtime.adapters import resident
from icc.runtime.adapters.adapter import Adapter, Change, LowRank, RowChange
from icc.runtime.adapters.base_weights import BaseWeights
from icc.runtime.adapters.resident import ResidentAdapters
from icc.runtime.executor.player import Player
from icc.runtime.format.adapters import ADAPTER_SECTION, AdapterSite
from icc.runtime.format.manifest import Limits
from icc.runtime.format.operands import OutputOperand
from icc.runtime.format.plan import Launch, Phase
from icc.runtime.format.program import LOGITS, Program
from icc.runtime.llm import LLM
from icc.runtime.requests.params import SamplingParams
from icc.runtime.speculate.speculator import Speculator
from planted_drafter import TreeDrafter

IDS = [1, 5, 9, 33, 70, 2, 8, 14, 3]
LIMITS = Limits(max_seq_len=40, max_batch_size=4, max_step_tokens=12)


@pytest.fixture(scope="module")
def model(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save_tiny(tiny.tiny_configs()["llama"], folder)
    return folder


@pytest.fixture(scope="module")
def roomy(model: Path) -> GpuEngine:
    """An engine with slots for every kind of adapter, over 4-bit weights."""
    return build(model, "rtn4", LIMITS, adapters="2x16+dora:all-linear,lm_head,embed_tokens")


@pytest.fixture(scope="module")
def built(model: Path) -> GpuEngine:
    return build(model, "none", LIMITS, adapters="2x16")


def adapter(sites: list[AdapterSite], number: int) -> Adapter:
    random = np.random.default_rng(number)
    changes: dict[str, Change] = {}
    for site in sites:
        a, b = (random.normal(0, 0.1, shape).astype(np.float32) for shape in ((8, site.k), (site.n, 8)))
        changes[site.parameter] = Change(low_rank=LowRank(a, b, 0.5))
    return Adapter(Path(str(number)), bytes([number]), "", (), changes)


def of_every_kind(sites: list[AdapterSite]) -> Adapter:
    """An adapter with magnitudes and biases, A and B for the table and the head, and rows of the table."""
    random, changes = np.random.default_rng(0), dict(adapter(sites, 0).changes)
    for site in sites:
        change = changes[site.parameter]
        if site.gain:
            size = random.uniform(0.5, 1.5, site.n).astype(np.float32)
            change = replace(change, magnitude=size)
        elif site.bias:
            change = replace(change, bias=random.normal(0, 0.2, site.n).astype(np.float32))
        elif site.table:
            change = replace(change, rows=RowChange((5, 70), random.normal(0, 0.1, (2, site.k)).astype(np.float32)))
        changes[site.parameter] = change
    return Adapter(Path("all"), b"all", "", (), changes)


def test_every_kind_in_an_interpreted_plan(roomy: GpuEngine, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, executor = roomy.program.adapters, roomy.executor()
    assert plan is not None and sum(bool(site.gain) for site in plan.sites) == len(plan.sites) - 2
    asked = of_every_kind(plan.sites)
    monkeypatch.setattr(resident, "read_adapter", lambda path, *_: asked)
    graph = load_graph(model, LIMITS.max_seq_len)
    run_passes(graph, [*pipelines.canonicalize(), *pipelines.quantize("rtn4", "int8", (), ())], PassContext())
    merge_adapter(graph, asked)
    expected = interpret(graph, IDS).numpy()
    with LLM(roomy.manifest, executor) as llm:
        base = BaseWeights(roomy.program.weights, lambda name: roomy.packed[name])
        llm.adapters = llm.driver.adapters = ResidentAdapters(plan, executor, base)
        before = llm.logits(IDS)
        llm.load_adapter("all", "x")
        found = llm.logits(IDS, adapter="all")
        assert np.abs(found - expected).max() < 3e-2 * np.abs(expected).max()
        assert np.abs(before - expected).max() > 1e-1 * np.abs(expected).max()
        assert np.array_equal(llm.logits(IDS), before)


def test_the_head_adds_in_place(roomy: GpuEngine) -> None:
    """Besides the logits, no buffer has the width of the vocabulary."""
    [step] = (s for s in roomy.program.steps if isinstance(s, ExpertProduct) and isinstance(s.y, OutputOperand))
    assert isinstance(step.extras[0], OutputOperand) and step.extras[0].name == step.y.name == LOGITS


def check(executor: Player[Any], built: GpuEngine, model: Path, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Check that adapters share two slots in turn, and that steps without adapters do not change."""
    plan = built.program.adapters
    assert plan is not None
    monkeypatch.setattr(resident, "read_adapter", lambda path, *_: adapter(plan.sites, int(path.name)))
    with LLM(built.manifest, executor) as llm:
        llm.adapters = llm.driver.adapters = ResidentAdapters(plan, executor, BaseWeights({}, np.zeros))
        before = llm.logits(IDS)
        for number in set(numbers):
            llm.load_adapter(f"n{number}", str(number))
        for number in numbers:
            graph = load_graph(model, LIMITS.max_seq_len)
            merge_adapter(graph, adapter(plan.sites, number))
            expected, found = interpret(graph, IDS).numpy(), llm.logits(IDS, adapter=f"n{number}")
            assert np.abs(found - expected).max() < 2e-2 * np.abs(expected).max()
            assert np.abs(before - expected).max() > 5e-2 * np.abs(expected).max()
        assert np.array_equal(llm.logits(IDS), before)


def test_in_an_interpreted_plan(built: GpuEngine, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(built.executor(), built, model, monkeypatch, 1, 2, 3)


@pytest.fixture(scope="module")
def divided(model: Path) -> GpuEngine:
    return build(model, "none", LIMITS, adapters="2x16", tensors=2)


def test_in_an_interpreted_plan_of_two_ranks(divided: GpuEngine, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has its part of A or of B, and adds its part of the change to its part of the sum."""
    check(divided.executor(), divided, model, monkeypatch, 1, 2)


def test_through_the_drivers_of_two_gpus(divided: GpuEngine, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode(divided)
    with node.installed(monkeypatch):
        check(node.player(), divided, model, monkeypatch, 1)


def test_through_the_driver_of_a_gpu(built: GpuEngine, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, driver = OnDisk(built.engine(), built, built.objects()).executor()
    check(executor, built, model, monkeypatch, 1)
    assert not driver.live and not driver.memory


def test_a_pool_is_written_beside_a_capture(built: GpuEngine) -> None:
    """The loading thread writes while another captures a graph: the copy is not captured."""
    plan = built.program.adapters
    assert plan is not None
    pool = plan.pools[0].weight
    executor, driver = OnDisk(built.engine(), built, built.objects()).executor()
    device, values = executor.device, np.full(64, 7, np.uint8)
    writer = Thread(target=device.write_pool, args=(pool, 128, values))

    def work() -> None:
        writer.start()
        writer.join(0.2)

    assert device.cuda.capture(work) == []
    writer.join()
    address = device._weights[pool] + 128
    assert ctypes.string_at(address, 64) == values.tobytes()
    executor.close()
    assert not driver.live


def test_the_base_launches_what_it_did(built: GpuEngine, model: Path) -> None:
    plain = build(model, "none", LIMITS).program
    assert built.program.num_own_steps == len(plain.steps)
    assert built.program.steps[: len(plain.steps)] == plain.steps


def test_trees_of_guesses(built: GpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses with branches: accepted keys and values move to their slots in the cache before the next step with
    adapters."""
    plan = built.program.adapters
    assert plan is not None
    monkeypatch.setattr(resident, "read_adapter", lambda path, *_: adapter(plan.sites, int(path.name)))
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with LLM(built.manifest, executor := built.executor()) as llm:
        llm.adapters = llm.driver.adapters = ResidentAdapters(plan, executor, BaseWeights({}, np.zeros))
        llm.load_adapter("one", "1")
        [plain] = llm.generate([IDS[:4]], params, adapter="one")
        llm.loop.speculator = Speculator(TreeDrafter(lambda _: plain.token_ids, 0.6), adaptive=False)
        [guessed] = llm.generate([IDS[:4]], params, adapter="one")
        assert guessed.token_ids == plain.token_ids
        assert 1 < llm.loop.speculator.counts.accepted < llm.loop.speculator.counts.guesses


def test_what_adapters_launch(tiny: Any, tmp_path: Path) -> None:
    """A product with A for each value that layers read: q, k and v, o, gate and up, down. B is added in these layers'
    own products. Steps without adapters launch the same as in an engine without adapter slots."""
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path / "model", dtype="bfloat16")
    built = build(tmp_path / "model", "none", LIMITS, adapters="2x16")
    plan, bare = built.program.plan, build(tmp_path / "model", "none", LIMITS).program.plan
    assert plan is not None and bare is not None
    layers = len(built.program.kv.groups[0].layers)

    def launches(program: Program, phase: Phase, section: str) -> list[Launch]:
        assert program.plan is not None
        calls = (program.plan.calls[number].kernel for number in program.steps_of(section))
        return [launch for kernel in calls for launch in phase.launches[kernel]]

    for phase, without in zip(plan.phases, bare.phases, strict=True):
        own, adapted = (launches(built.program, phase, section) for section in ("", ADAPTER_SECTION))
        assert len(adapted) == len(own) + 4 * layers
        assert [launch.object for launch in own] == [
            launch.object for call in bare.calls for launch in without.launches[call.kernel]
        ]
