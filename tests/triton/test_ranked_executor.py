"""Several GPUs over fake drivers: the tokens of the interpreted plan, whichever rank is ahead; the failure when a rank
is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from building import GpuEngine, build
from fake_ranks import FakeNode
from icc import SamplingParams
from icc.compiler.targets import TARGETS
from icc.runtime.errors import DeviceError
from icc.runtime.format.manifest import Limits
from icc.runtime.llm import LLM
from sizes import soak

pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 23, 7, 11], [8, 3]]
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
Engines = Callable[..., GpuEngine]


@pytest.fixture(scope="module")
def engine_of(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    model = tmp_path_factory.mktemp("model")
    config = tiny.tiny_configs()["llama"]
    config.num_hidden_layers = 1
    tiny.save_tiny(config, model)

    @cache
    def make(ranks: int, target: str = "h100", rows: int = 0) -> GpuEngine:
        # steps are padded to a multiple of 4 or to the largest size, which with `rows` does not divide evenly
        limits = Limits(max_seq_len=24, max_batch_size=2, max_step_tokens=7 if rows else 8)
        return build(model, "none", limits, target=TARGETS[target], tensors=ranks, rows=rows)

    return make


@pytest.fixture(scope="module")
def expected(engine_of: Engines) -> list[list[int]]:
    with engine_of(1).llm() as llm:
        return [c.token_ids for c in llm.generate(PROMPTS, PARAMS)]


def tokens(node: FakeNode) -> list[list[int]]:
    with LLM(node.engine.manifest, node.player()) as llm:
        return [c.token_ids for c in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(("ranks", "seed", "hip"), [(2, 0, False), *soak((2, 1, False), (4, 2, False)), (2, 3, True)])
def test_ranks_give_the_tokens_of_one_whoever_is_ahead(
    ranks: int, seed: int, hip: bool, engine_of: Engines, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last case runs with the API of HIP."""
    node = FakeNode(engine_of(ranks), seed, hip=hip)
    with node.installed(monkeypatch):
        assert tokens(node) == expected
    first, second = node.drivers[:2]
    assert first.graph_launches == second.graph_launches > 0 and first.eager_launches == second.eager_launches > 0
    assert not any(driver.live or driver.memory for driver in node.drivers)
    assert node.nccl.calls == []


def test_a_communicator_where_gpus_do_not_see_each_other(
    engine_of: Engines, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an L4, also inside graphs; the communicator is destroyed at the end."""
    node = FakeNode(engine_of(2, "l4"), capability=(8, 9))
    with node.installed(monkeypatch):
        assert tokens(node) == expected
    assert {"ncclCommInitRank", "ncclAllReduce", "ncclAllGather", "ncclCommDestroy"} == set(node.nccl.calls)
    assert node.drivers[0].graph_launches > 0


@pytest.mark.parametrize(("target", "seed"), [("l4", 0), ("h100", 1), *soak(("l4", 2), ("h100", 3))])
def test_prompts_by_rows(
    target: str, seed: int, engine_of: Engines, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 7 tokens of two prompts: 3 rows per rank, and one more on the last rank. Decodes, in graphs, have whole
    sums."""
    node = FakeNode(engine_of(2, target, rows=4), seed, capability=(8, 9) if target == "l4" else (9, 0))
    with node.installed(monkeypatch):
        assert tokens(node) == expected
    assert node.drivers[0].graph_launches > 0
    by_rows = ("ncclReduceScatter", "ncclReduce", "ncclAllGather", "ncclBroadcast")
    found = [name for name in node.nccl.calls if name in (*by_rows, "ncclAllReduce")]
    assert set(found) == (set() if target == "h100" else {*by_rows, "ncclAllReduce"})
    assert not any(driver.live or driver.memory for driver in node.drivers)


def test_without_a_communicator_such_gpus_refuse_in_words(engine_of: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode(engine_of(2, "l4"), capability=(8, 9))
    node.nccl = None  # type: ignore[assignment]
    with node.installed(monkeypatch), pytest.raises(DeviceError, match="exchange values by NCCL alone"):
        node.player()


ENDS, HANGS = ("ends", "rank 1 has ended with -9", 600.0), ("hangs", "a rank has not answered for 5 s", 5.0)
LOST = [(*ENDS, "h100", 0), *soak((*ENDS, "l4", 0), (*HANGS, "l4", 0)), (*HANGS, "h100", 0)]
LOST += [(*ENDS, "l4", 4), *soak((*ENDS, "h100", 4), (*HANGS, "l4", 4))]  # prompts by rows


@pytest.mark.parametrize(("how", "said", "patience", "target", "rows"), LOST)
def test_a_rank_that_is_lost_ends_requests_in_bounded_time_and_the_engine_can_be_loaded_again(
    how: str,
    said: str,
    patience: float,
    target: str,
    rows: int,
    engine_of: Engines,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: dict[str, Any] = {"capability": (8, 9)} if target == "l4" else {}
    node = FakeNode(engine_of(2, target, rows), **found, **{how: (1, 4)})  # after two graphs and two steps
    with node.installed(monkeypatch, patience):
        player = node.player()
        with LLM(node.engine.manifest, player) as llm:
            with pytest.raises(DeviceError, match=said):
                llm.generate(PROMPTS, PARAMS)
            began = time.monotonic()
            with pytest.raises(DeviceError, match=said):  # later requests fail too, at once
                llm.generate(PROMPTS, PARAMS)
            assert time.monotonic() - began < 60  # not the 600 s that are allowed for a rank
    again = FakeNode(engine_of(2, target, rows), **found)
    with again.installed(monkeypatch):
        assert tokens(again) == expected
