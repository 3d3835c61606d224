"""Engines of several ranks for GPUs: their plans, interpreted in lockstep, give the logits of one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from building import GpuEngine, build
from icc.compiler.links import one_shot_seconds, ring_seconds
from icc.compiler.targets import TARGETS
from icc.passes.parallel.divide import DivideAmongRanks
from icc.runtime.format.manifest import Limits
from icc.runtime.llm import LLM
from msgspec.structs import replace
from sizes import soak

pytestmark = pytest.mark.slow

LIMITS = Limits(max_seq_len=20, max_batch_size=2, max_step_tokens=8)
IDS = np.random.default_rng(0).integers(3, 119, 13).tolist()
PROMPTS = [IDS, IDS[:5]]
MLA = "deepseek_v3-latent_grouped_routing"
# (model, ranks that divide tensors, ranks that divide experts)
USUAL = [("llama", 2, 1), ("mixtral", 1, 2)]
ODD = 7  # tokens of the largest step; steps are padded to it
# (model, ranks, weights) for prompts by rows
BY_ROWS = [("llama", 2, "rtn4"), ("mixtral", 2, "none")]
MORE_BY_ROWS = [
    ("llama", 2, "none"), ("llama", 4, "none"), ("llama", 4, "rtn4"), ("mixtral", 4, "rtn4"), ("mixtral", 4, "none"),
    ("mixtral", 2, "rtn4"), (MLA, 2, "none"), (MLA, 4, "none"), (MLA, 2, "rtn4"), (MLA, 4, "rtn4"),
]  # fmt: skip
MORE = [("llama", 4, 1), ("llama", 8, 1), ("gemma3", 2, 1), ("mixtral", 4, 4), (MLA, 2, 2), (MLA, 4, 1)]
Engines = Callable[..., GpuEngine]


@pytest.fixture(scope="module")
def engine_of(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    @cache
    def checkpoint(name: str) -> Path:
        path = tmp_path_factory.mktemp("model")
        tiny.save_tiny(tiny.tiny_configs()[name], path)
        return path

    @cache
    def make(
        name: str, tensors: int, experts: int, target: str = "h100", rows: int = 0, quant: str = "none", steps: int = 8
    ) -> GpuEngine:
        found = {"tensors": tensors, "experts": experts, "target": TARGETS[target], "rows": rows}
        limits = replace(LIMITS, max_step_tokens=steps)
        return build(checkpoint(name), quant, limits, block_size=4, group=16 if quant == "rtn4" else None, **found)

    return make


def logits(engine: GpuEngine, ids: list[int] = IDS) -> np.ndarray:
    with engine.llm() as llm:
        return llm.logits(ids)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize(("name", "tensors", "experts"), [*USUAL, *soak(*MORE)])
def test_ranks_give_the_logits_of_one(name: str, tensors: int, experts: int, engine_of: Engines) -> None:
    one, own = engine_of(name, 1, 1), engine_of(name, tensors, experts)
    assert own.graph.ranks == max(tensors, experts) == 1 + len(own.others)
    if tensors == 1:
        assert np.array_equal(logits(own), logits(one))
    else:
        assert difference(logits(own), logits(one)) < (DivideAmongRanks.tolerance or 0)


def test_every_rank_has_the_same_logits_whoever_is_ahead(engine_of: Engines) -> None:
    """Ranks sample on their own devices. The order in which they run, random here, has no effect."""
    engine, random = engine_of("llama", 2, 1), Random(3)
    player = engine.ranks(choose=lambda ready: random.choice(ready))
    wanted = logits(engine)
    with LLM(engine.manifest, player) as llm:
        assert np.array_equal(llm.logits(IDS), wanted)
        one, *others = player.device.all_logits(2)  # type: ignore[attr-defined]
    assert all(np.array_equal(one, other) for other in others) and np.abs(one).max() > 0


def test_gpus_that_do_not_see_each_other_need_a_communicator(engine_of: Engines) -> None:
    """On an L4 all exchanges use a communicator, and logits are bit-equal; without one nothing runs."""
    engine = engine_of("llama", 2, 1, "l4")
    wanted = logits(engine_of("llama", 2, 1))
    with LLM(engine.manifest, engine.ranks(exchanges=True)) as llm:
        assert np.array_equal(llm.logits(IDS), wanted)
    with LLM(engine.manifest, engine.ranks()) as llm, pytest.raises(Exception, match="there is no communicator"):
        llm.logits(IDS)


@pytest.mark.parametrize(("name", "ranks", "quant"), [*BY_ROWS, *soak(*MORE_BY_ROWS)])
def test_prompts_by_rows(name: str, ranks: int, quant: str, engine_of: Engines) -> None:
    """Two steps of 7 rows, of which the last rank has more than others; and a step of 4, which is not divided. If a
    rank's rows must begin at a multiple of four for alignment, one step of 16."""
    experts, steps = 1 if name == "llama" else ranks, 19 if name == MLA else ODD
    one, own = engine_of(name, 1, 1, quant=quant), engine_of(name, ranks, experts, "h100", 5, quant, steps)
    plan = own.program.plan
    assert plan is not None and own.graph.ranks == ranks and sum(call.own for call in plan.calls) >= 2
    assert [phase.own is not None for phase in plan.phases] == [not phase.decode for phase in plan.phases]
    wanted = logits(one)
    assert difference(logits(own), wanted) < (DivideAmongRanks.tolerance or 0)
    assert difference(logits(own, IDS[:2]), logits(one, IDS[:2])) < (DivideAmongRanks.tolerance or 0)


@pytest.mark.parametrize(("target", "quant"), [("h100", "fp8"), *soak(("h100", "none"), ("l4", "none"))])
def test_by_rows_the_bits_are_those_of_whole_sums(target: str, quant: str, engine_of: Engines) -> None:
    """Through memory and through a communicator, with 2 ranks of a llama. A norm does not write 8-bit rows that other
    ranks would need: they are made from the gathered rows."""
    whole, own = (engine_of("llama", 2, 1, *more, quant, ODD) for more in (("h100", 0), (target, 5)))
    wanted = logits(whole)
    for exchanges in {target == "l4", True}:
        with LLM(own.manifest, own.ranks(exchanges=exchanges)) as llm:
            assert np.array_equal(llm.logits(IDS), wanted)


def test_a_row_that_is_not_gathered_shows(engine_of: Engines) -> None:
    """With a plan that gathers nothing, logits differ."""
    engine = engine_of("llama", 2, 1, "h100", 5, "fp8", ODD)
    plan = engine.program.plan
    assert plan is not None
    gathers = {call.kernel for call in plan.calls if call.kernel.startswith("all_gather_rows")}
    phases = [
        replace(phase, launches={k: () if k in gathers else many for k, many in phase.launches.items()})
        for phase in plan.phases
    ]
    broken = dataclasses.replace(engine, program=replace(engine.program, plan=replace(plan, phases=tuple(phases))))
    assert not difference(logits(broken), logits(engine)) < 0.01


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("target", ["a100", "h100", "h200", "b200", "mi300x"])
def test_small_sums_go_through_memory_and_large_ones_through_a_communicator(target: str, ranks: int) -> None:
    """With 8,192 columns, a decode of 8 rows is faster through memory; 8,192 rows on 4 ranks and more are not."""
    ways = [one_shot_seconds(4 * 8192 * rows, ranks, TARGETS[target]) for rows in (8, 8192)]
    rings = [ring_seconds(4 * 8192 * rows, ranks, TARGETS[target]) for rows in (8, 8192)]
    assert ways[0] < rings[0]
    assert ranks == 2 or rings[1] < ways[1]
