"""divide: published families with ranks in lockstep; the parts of values on ranks; transformers' own plans."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from icc.compiler.eviction import read_eviction
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.tensor_types import type_of
from icc.compiler.ops import OPS
from icc.compiler.weights.formats.base import Misfit
from icc.compiler.weights.formats.registry import find_format
from icc.compiler.weights.handles import Constant, RoundedWeight
from icc.compiler.weights.shards import Shard, of_rank, shard
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.parallel.cuts import Conflict, Cut, elements, evenly, reshaped, sliced
from icc.passes.parallel.divide import DivideAmongRanks
from sizes import soak, usual

IDS = [3, 17, 101, 44, 8, 8, 63, 2, 90, 11, 12]
# the number of a model's products divided among two ranks, by kind, over both layers and the head
FAMILIES = {
    "llama": {"words": 1, "columns": 15},  # q, k, v, gate, up; o and down are cut by rows
    "gemma3": {"words": 1, "columns": 15},
    "gpt2": {"words": 1, "columns": 13},
    "gpt_oss": {"words": 1, "columns": 9, "experts": 4},
    "mixtral": {"words": 1, "columns": 9, "experts": 4},
    "deepseek_v3-latent_grouped_routing": {"words": 1, "columns": 15, "experts": 2},
    "qwen3_next-delta_rule": {"words": 1, "columns": 14, "experts": 4},
    "bamba-state_space": {"words": 1, "columns": 17},  # the output of a convolution is also sliced: x, B, C
}
MORE = (
    "falcon-written_out_mqa",
    "minimax-lightning_attention",
    "jamba-selective_scan",
    "lfm2-short_convolutions",
    "phi3",
    "opt",
)


@pytest.fixture(scope="module")
def prepared(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Graph]:
    """A tiny family's graph after the phase `attention`, quantized by rtn4 if requested."""
    known: dict[Any, Graph] = {}

    def make(name: str, quant: str = "none") -> Graph:
        if (name, quant) not in known:
            path = tmp_path_factory.mktemp("model")
            tiny.save_tiny(tiny.tiny_configs()[name], path)
            graph = load_graph(path, 64)
            run_passes(graph, pipelines.canonicalize(), PassContext())
            run_passes(graph, pipelines.quantize(quant, "int8", (), ()), PassContext())
            run_passes(graph, pipelines.attention(), PassContext())
            known[name, quant] = graph
        return known[name, quant]

    return make


def divided(graph: Graph, ranks: int, tensors: bool, experts: bool) -> tuple[Graph, dict[str, int]]:
    """The graph divided among ranks, after the phase `fuse`, and the counts of the pass."""
    own = graph.copy()
    [report] = run_passes(own, [DivideAmongRanks(ranks, tensors, experts)], PassContext())
    run_passes(own, pipelines.fuse(), PassContext())
    return own, report.counts


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("name", [*usual(FAMILIES, "deepseek_v3-latent_grouped_routing", "gemma3"), *soak(*MORE)])
def test_ranks_in_lockstep_give_the_logits_of_one(name: str, prepared: Callable[..., Graph]) -> None:
    graph = prepared(name)
    wanted = interpret(graph, IDS)
    own, counts = divided(graph, 2, tensors=True, experts=True)
    assert difference(interpret(own, IDS), wanted) < 1e-5
    if name in FAMILIES:
        assert {kind: counts[kind] for kind in FAMILIES[name]} == FAMILIES[name]
    four, _ = divided(graph, 4, tensors=True, experts=False)
    assert difference(interpret(four, IDS), wanted) < 1e-5


@pytest.mark.parametrize(
    "name",
    usual([name for name, counts in FAMILIES.items() if "experts" in counts], "deepseek_v3-latent_grouped_routing"),
)
def test_experts_keep_every_bit(name: str, prepared: Callable[..., Graph]) -> None:
    graph = prepared(name)
    alone = graph.copy()
    run_passes(alone, pipelines.fuse(), PassContext())
    for ranks in (2, 4):
        own, counts = divided(graph, ranks, tensors=False, experts=True)
        assert counts["experts"] and "columns" not in counts
        assert torch.equal(interpret(own, IDS), interpret(alone, IDS))


@pytest.mark.parametrize("name", ["llama", "mixtral", *soak("deepseek_v3-latent_grouped_routing")])
def test_codes_are_cut_not_made_again(name: str, prepared: Callable[..., Graph]) -> None:
    graph = prepared(name, "rtn4")
    own, _ = divided(graph, 2, tensors=True, experts=True)
    assert difference(interpret(own, IDS), interpret(graph, IDS)) < 1e-5
    stored = {weight.storage.name for weight in own.weights.values()}
    assert any(name.startswith("q4") for name in stored), stored


def test_a_norm_over_all_heads_is_of_sums_over_ranks(tiny: Any, tmp_path: Path) -> None:
    """OLMo 2: q and k are normed over all their heads; also if ranks share key heads."""
    from transformers import Olmo2Config

    config = Olmo2Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=120, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    tiny.save_tiny(config, tmp_path)
    graph = load_graph(tmp_path, 64)
    for phase in (pipelines.canonicalize(), pipelines.attention()):
        run_passes(graph, phase, PassContext())
    wanted = interpret(graph, IDS)
    for ranks in (2, 4):
        own, counts = divided(graph, ranks, tensors=True, experts=False)
        assert difference(interpret(own, IDS), wanted) < 1e-5
        assert counts["columns"] == 15 and not counts.get("kept whole")
        sums = sum(node.target is OPS["all_reduce"].overload for node in own.nodes)
        assert sums == 1 + 2 * (2 + 2)  # looked-up words; per layer o and down, and the norms of q and k


def test_keys_that_ranks_share_are_not_chosen_apart(tiny: Any, tmp_path: Path) -> None:
    """--kv-policy h2o: on four ranks, two key heads would be scored by a part of their queries only; attention is not
    divided by four."""
    policy = read_eviction("h2o:budget=64,recent=16")
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path)
    graph = load_graph(tmp_path, 64, policy=policy)
    for phase in (pipelines.canonicalize(), pipelines.attention(policy)):
        run_passes(graph, phase, PassContext())
    for ranks, fits in ((2, True), (4, False)):
        own = graph.copy()
        context = PassContext()
        run_passes(own, [DivideAmongRanks(ranks, True, False)], context)
        found = [refusal for refusal in context.refusals if "choose among by its own queries" in refusal.reason]
        assert bool(found) is not fits
        heads = {type_of(node.args[1]).shape[0] for node in own.attention_nodes}
        assert heads == ({1} if fits else {2})


def test_what_is_cut_covers_the_weights_once(prepared: Callable[..., Graph]) -> None:
    """The parts of both ranks make up the weight, so that a rank's file has half of each divided weight."""
    graph = prepared("llama")
    own, _ = divided(graph, 2, tensors=True, experts=False)
    whole = sum(prod(weight.shape) for weight in graph.weights.values())
    part = sum(prod(weight.shape) for weight in own.weights.values())
    norms = sum(prod(w.shape) for name, w in graph.weights.items() if "norm" in name or "position" in name)
    assert part <= (whole - norms) / 2 + norms + 2


# -- transformers' plans ----------------------------------------------------------------------------------------------

KINDS = {"colwise": 0, "rowwise": 1, "colwise_gather_output": 0, "colwise_rep": 0, "rowwise_rep": 1}
PLANNED = [
    "llama", "phi3", "mixtral", "llama-mqa_tied_biases_llama3",
    *soak(
        "gemma3",
        "qwen3",
        "llama-mha",
        "llama-odd",
        "llama-linear",
        "llama-yarn",
        "llama-dynamic",
        "mistral",
        "mistral-no_window_tied",
        "mistral-odd",
        "qwen2",
        "qwen2-tied_yarn",
        "qwen2-window",
        "qwen3-odd_tied_biases",
        "gemma2",
        "gemma2-no_caps",
        "gemma2-odd",
        "gemma3-odd_untied",
        "phi3-mha_partial_tied",
        "phi3-longrope",
        "gpt_neox",
        "gpt_neox-sequential_full_rotary",
        "gpt_neox-no_bias_tied",
        "mixtral-top1_window",
        "mixtral-odd",
        "qwen3_moe",
        "qwen3_moe-mixed_renormalized",
        "cohere-interleaved_rotary",
        "granite-multipliers",
    ),
]  # fmt: skip
# linears that are divided differently from transformers' plan: two ranks cannot divide three heads (which transformers
# does not check), and one key head serves both ranks' queries
_KEYS = dict.fromkeys((f"layers.*.self_attn.{name}_proj" for name in "kv"), "whole")
_HEADS = dict.fromkeys((f"layers.*.self_attn.{name}_proj" for name in "qkvo"), "whole")


def _name(case: Any) -> str:
    """The model's name of a case, which soak() has wrapped if only soak runs it."""
    return case if isinstance(case, str) else case.values[0]


UNLIKE: dict[str, dict[str, str]] = {
    "llama-mqa_tied_biases_llama3": _KEYS,
    **dict.fromkeys((name for name in map(_name, PLANNED) if "-odd" in name), _HEADS),
}


def unlike_plan(graph: Graph, plan: dict[str, str]) -> dict[str, str]:
    """The linears that `base_model_tp_plan` divides and two ranks divide differently, and how. Experts are left out:
    transformers names them differently."""
    own = graph.copy()
    run_passes(own, [DivideAmongRanks(2, True, False)], PassContext())
    found: dict[str, int] = {}
    for key, weight in own.weights.items():
        if isinstance(weight, Shard) and ".layers." in key:
            module = re.sub(r"(\.weight)?(#\d+)?$", "", re.sub(r"^.*?layers\.\d+", "layers.*", key))
            found[module] = weight.axis - len(weight.shape) + 2
    there = {re.sub(r"\.weight(#\d+)?$", "", re.sub(r"^.*?layers\.\d+", "layers.*", key)) for key in graph.weights}
    planned = {m: KINDS[k] for m, k in plan.items() if k in KINDS and m.startswith("layers.*") and "experts" not in m}
    return {
        module: f"by {'columns rows'.split()[found[module]]}" if module in found else "whole"
        for module, axis in planned.items()
        if module in there and found.get(module) != axis
    }


@pytest.mark.parametrize("name", PLANNED)
def test_the_split_is_that_of_transformers_plan(name: str, prepared: Callable[..., Graph], tiny: Any) -> None:
    """Each linear that `base_model_tp_plan` divides is divided along the same axis, except those in UNLIKE."""
    plan = tiny.tiny_configs()[name].base_model_tp_plan
    assert plan and unlike_plan(prepared(name), plan) == UNLIKE.get(name, {})


# -- parts of values --------------------------------------------------------------------------------------------------


def local(value: torch.Tensor, cut: Cut, rank: int) -> torch.Tensor:
    """The part of a value on a rank."""
    return value.index_select(cut.axis, torch.tensor(elements(cut.cuts[rank])))


@st.composite
def cut_values(draw: st.DrawFn) -> tuple[torch.Tensor, Cut]:
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    axis, ranks = draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from([2, 3]))
    shape[axis] *= ranks * draw(st.sampled_from([1, 2]))
    value = torch.arange(prod(shape)).reshape(shape)
    return value, Cut(axis, evenly(0, shape[axis], ranks, ranks), frozenset())


@settings(max_examples=200, deadline=None)
@given(cut_values(), st.data())
def test_a_view_of_parts_is_the_part_of_the_view(made: tuple[torch.Tensor, Cut], data: st.DataObject) -> None:
    value, cut = made
    factors = data.draw(st.permutations([2, 2, 3, 3, 4, 6]))
    size, shape = prod(value.shape), list[int]()
    for factor in factors:
        if size % factor == 0:
            shape.append(factor)
            size //= factor
    shape.append(size)
    try:
        found = reshaped(cut, value.shape, shape)
    except Conflict:
        return
    for rank in range(len(cut.cuts)):
        own = [found.size if axis == found.axis else n for axis, n in enumerate(shape)]
        assert torch.equal(local(value, cut, rank).reshape(own), local(value.reshape(shape), found, rank))


@settings(max_examples=200, deadline=None)
@given(cut_values(), st.data())
def test_a_slice_of_parts_is_the_part_of_the_slice(made: tuple[torch.Tensor, Cut], data: st.DataObject) -> None:
    value, cut = made
    size = value.shape[cut.axis]
    begin = data.draw(st.integers(0, size - 1))
    end, step = data.draw(st.integers(begin + 1, size)), data.draw(st.integers(1, 3))
    try:
        found, (low, high) = sliced(cut, begin, end, step)
    except Conflict:
        return
    index = torch.arange(begin, end, step)
    for rank in range(len(cut.cuts)):
        own = local(value, cut, rank)
        taken = own.index_select(cut.axis, torch.arange(low, high, step))
        assert torch.equal(taken, local(value.index_select(cut.axis, index), found, rank))


def test_a_group_that_would_be_cut_is_a_misfit() -> None:
    weight = RoundedWeight(Constant(torch.randn(8, 64)), find_format("q4", 32))
    halves = shard(weight, 1, evenly(0, 64, 2, 2))
    assert torch.equal(torch.cat([of_rank(halves, rank).load() for rank in (0, 1)], 1), weight.load())
    with pytest.raises(Misfit, match="blocks along axis 1"):
        shard(weight, 1, evenly(0, 64, 4, 4))


def test_ranks_have_every_byte_once() -> None:
    weight = Constant(torch.arange(24.0).reshape(4, 6))
    parts = shard(weight, 0, evenly(0, 4, 2, 2))
    assert torch.equal(torch.cat([of_rank(parts, rank).load() for rank in (0, 1)]), weight.value)
    assert of_rank(weight, 1) is weight and of_rank(parts, 0).load().shape == (2, 6)
