"""Adapters on engines of several ranks: the numbers of one rank, however weights are divided, and no effect on the
base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
from icc import SamplingParams
from icc.runtime.executor.cpu.ranked import RankedDevice
from icc.runtime.format.load import open_engine
from icc.runtime.llm import LLM
from peft_models import adapted_logits, save_adapter
from sizes import soak

IDS = [5, 9, 33, 70, 2, 8, 14, 55, 101, 7, 7, 90]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS = [IDS[i : i + 6] for i in range(6)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
NAMES = [None, "first", "second", "third", "first", None]
Make = Callable[..., Path]
TENSORS, STAGES = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
FOUR, BY_ROWS = {**TENSORS, **STAGES}, {**TENSORS, "sequence_parallel": True}


@pytest.fixture(scope="module")
def adapters(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, patterns = tmp_path_factory.mktemp("adapters"), {r"layers\.0\..*q_proj": 16, "up_proj": 2}
    kinds: dict[str, dict[str, Any]] = {
        "first": {},
        "second": {"rank_pattern": patterns},
        "third": {"lora_bias": True},
    }
    return {
        name: save_adapter(model("llama"), folder / name, seed, r=4, target_modules=PROJECTIONS, **kind)
        for seed, (name, kind) in enumerate(kinds.items())
    }


def difference(expected: Any, found: np.ndarray) -> float:
    wanted = np.asarray(expected)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def answers(llm: LLM, adapters: dict[str, Path]) -> list[list[int]]:
    """The answers of a batch whose sequences have different adapters, more of them than there are slots."""
    for name, path in adapters.items():
        llm.load_adapter(name, path)
    return [found.token_ids for found in llm.generate(PROMPTS, PARAMS, adapter=NAMES)]


@pytest.fixture(scope="module")
def wanted(engine: Make, adapters: dict[str, Path]) -> list[list[int]]:
    with icc.load(engine("llama", adapters="2x16")) as llm:
        return answers(llm, adapters)


@pytest.mark.parametrize(
    "ranks",
    [TENSORS, STAGES, *soak({"tensor_parallel": 4}, FOUR, BY_ROWS)],
)
def test_ranks_answer_as_one(
    ranks: dict[str, int], engine: Make, model: Callable[[str], Path], adapters: dict[str, Path],
    wanted: list[list[int]],
) -> None:  # fmt: skip
    """Mixed batches, three adapters in two slots. Logits are PEFT's; without an adapter they are those of an engine
    without adapter slots, bit for bit. An adapter that was unloaded has no effect."""
    with icc.load(engine("llama", **ranks), threads=2) as plain:
        base = plain.logits(IDS)
    with icc.load(engine("llama", adapters="2x16", **ranks), threads=2) as llm:
        assert isinstance(llm.executor.device, RankedDevice)  # type: ignore[attr-defined]
        assert answers(llm, adapters) == wanted
        for name, path in adapters.items():
            assert difference(adapted_logits(model("llama"), path, IDS), llm.logits(IDS, adapter=name)) < 2e-5, name
        assert np.array_equal(llm.logits(IDS), base)
        llm.unload_adapter("first")
        with pytest.raises(icc.IccError, match="there is no adapter 'first'"):
            llm.logits(IDS, adapter="first")


def test_pools_are_cut_as_their_weights(engine: Make) -> None:
    """Column-parallel layers: A is whole, B is cut by rows. Row-parallel layers: A is cut by columns, B is whole, and
    one rank alone adds the bias."""
    found = open_engine(engine("llama", adapters="2x16", **TENSORS))
    plan = found.program.adapters
    assert plan is not None
    pools = {pool.weight: pool for pool in plan.pools}
    sites = {site.parameter.split("layers.0.")[-1]: site for site in plan.sites}
    q, down = sites["self_attn.q_proj.weight"], sites["mlp.down_proj.weight"]
    halves = [[(0, q.n // 2)], [(q.n // 2, q.n)]]
    assert not pools[q.a].cuts and (pools[q.b].axis, pools[q.b].cuts, pools[q.b].n) == (1, halves, q.n // 2)
    assert pools[q.bias].cuts == halves
    halves = [[(0, down.k // 2)], [(down.k // 2, down.k)]]
    assert (pools[down.a].axis, pools[down.a].cuts, pools[down.a].k) == (2, halves, down.k // 2)
    assert not pools[down.b].cuts and pools[down.bias].cuts == [[(0, down.n)], []]
    found.close()


EXPERTS = {
    "r": 4, "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}  # fmt: skip


def test_experts_keep_every_bit(engine: Make, model: Callable[[str], Path], tmp_path: Path) -> None:
    """Whole experts on each rank, with their own A and B; also cut by columns."""
    path, room = save_adapter(model("qwen3_moe"), tmp_path / "own", **EXPERTS), "2x16:q_proj,o_proj,experts.*"
    found: list[np.ndarray] = []
    for ranks in ({}, {"expert_parallel": 2}, TENSORS):
        with icc.load(engine("qwen3_moe", adapters=room, **ranks), threads=2) as llm:
            llm.load_adapter("own", path)
            found.append(llm.logits(IDS, adapter="own"))
            assert difference(llm.logits(IDS), found[0]) > 1e-3
    assert np.array_equal(found[0], found[1]) and difference(found[0], found[2]) < 2e-5


def test_scales_of_a_quantized_base(engine: Make, model: Callable[[str], Path], adapters: dict[str, Path]) -> None:
    """AWQ scales the inputs of A and the outputs of B, also for layers of another stage."""
    found: list[np.ndarray] = []
    options = {"adapters": "2x16", "quant": "awq4", "calib_sequences": 2, "calib_length": 32}
    for ranks in ({}, STAGES):
        with icc.load(engine("llama", **options, **ranks), threads=2) as llm:
            llm.load_adapter("first", adapters["first"])
            found.append(llm.logits(IDS, adapter="first"))
    assert np.array_equal(found[0], found[1])


ROOM = "2x16+dora:all-linear,lm_head,embed_tokens"
WHOLE = {  # adapters that need the base's weights, which are cut
    "dora": {"r": 4, "target_modules": PROJECTIONS, "use_dora": True},
    "tokens": {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [5, 101]},
    "table and head": {"r": 4, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},  # both are saved whole, too
}


@pytest.fixture(scope="module")
def whole(engine: Make, model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Paths of the adapters by name, and the answers of one rank."""
    folder = tmp_path_factory.mktemp("whole")
    paths = {name: save_adapter(model("llama"), folder / name, 3, **options) for name, options in WHOLE.items()}
    with icc.load(engine("llama", adapters=ROOM)) as llm:
        return paths, _answers_by_name(llm, paths)


def _answers_by_name(llm: LLM, paths: dict[str, Path]) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {}
    for name, path in paths.items():
        llm.load_adapter(name, path)
        found[name] = [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS, adapter=name)]
    return found


@pytest.mark.parametrize("ranks", [TENSORS, *soak(STAGES, FOUR, {"tensor_parallel": 4}, BY_ROWS)])
def test_what_is_compared_with_weights_in_parts(
    ranks: dict[str, int], engine: Make, model: Callable[[str], Path], whole: Any
) -> None:
    """Magnitudes, rows of an embedding and of a head, whole matrices: rank 0 reads the other ranks' parts of the
    weights. The answers are those of one rank, the logits PEFT's; without an adapter those of an engine without adapter
    slots."""
    paths, wanted = whole
    with icc.load(engine("llama", **ranks), threads=2) as plain:
        base = plain.logits(IDS)
    with icc.load(engine("llama", adapters=ROOM, **ranks), threads=2) as llm:
        assert _answers_by_name(llm, paths) == wanted
        for name, path in paths.items():
            assert difference(adapted_logits(model("llama"), path, IDS), llm.logits(IDS, adapter=name)) < 2e-5, name
        assert np.array_equal(llm.logits(IDS), base)


@pytest.mark.parametrize("quant", soak("rtn4", "int8", "awq4"))
def test_magnitudes_over_a_quantized_base_in_parts(quant: str, engine: Make, whole: Any) -> None:
    """Norms are computed from the ranks' codes. The logits are those of one rank, except that each rank rounds rows to
    8 bits by the maxima of its own part, which changes the base's logits as much."""
    found: list[np.ndarray] = []
    base: list[np.ndarray] = []
    options = {
        "adapters": "2x16+dora",
        "quant": quant,
        **({"calib_sequences": 2, "calib_length": 32} if quant == "awq4" else {}),
    }
    for ranks in ({}, TENSORS):
        with icc.load(engine("llama", **options, **ranks), threads=2) as llm:
            llm.load_adapter("dora", whole[0]["dora"])
            found.append(llm.logits(IDS, adapter="dora"))
            base.append(llm.logits(IDS))
            assert difference(base[-1], found[-1]) > 0.1
    assert difference(*found) < max(1e-3, 2 * difference(*base)) < 0.1
