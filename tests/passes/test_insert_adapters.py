"""insert-adapters: where adapter slots are inserted, what they compute, and that folded scales reach adapters."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from graph_tracing import difference
from icc.compiler.adapter_slots import AdapterSlots, read_adapter_slots
from icc.compiler.errors import UsageError
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.weights.handles import Constant
from icc.passes import pipelines
from icc.passes.adapters.insert import InsertAdapters
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.quantize.awq import QuantizeAwq
from sizes import usual

IDS = torch.randint(3, 119, (13,), generator=torch.Generator().manual_seed(1)).tolist()
TEXTS = [torch.randint(3, 119, (24,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(4)]
RANK = 16


def canonical(tiny: ModuleType, family: str, path: Path) -> Graph:
    if not path.is_dir():
        tiny.save_tiny(tiny.tiny_configs()[family], path)
    graph = load_graph(path)
    run_passes(graph, pipelines.canonicalize(), PassContext())
    return graph


def with_room(graph: Graph, slots: AdapterSlots) -> Graph:
    adapted = graph.copy()
    run_passes(adapted, [InsertAdapters(slots)], PassContext())
    return adapted


def fill(graph: Graph, slot: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Put a random adapter into a slot of all pools; returns its change of each weight of the checkpoint."""
    random = torch.Generator().manual_seed(seed)
    changes: dict[str, torch.Tensor] = {}
    for site in graph.sites:
        values: list[torch.Tensor] = []
        for name, first, rows in ((site.a, site.row, RANK), (site.b, 0, None)):
            weight = graph.weights[name]
            if not isinstance(weight, Constant):
                graph.weights[name] = weight = Constant(torch.zeros(weight.shape))
            count = max(site.experts, 1)
            part = weight.value[slot * count : (slot + 1) * count, first : None if rows is None else first + rows]
            part += torch.randn(part.shape, generator=random) * 0.1
            values.append(part.clone())
            if (columns := site.columns) is not None and rows is not None:
                part *= columns
            if (factors := site.rows) is not None and rows is None:
                part *= factors[:, None]
        product = values[1] @ values[0]
        changes[site.parameter] = product if site.experts else product[0]
    return changes


def added(graph: Graph, changes: dict[str, torch.Tensor]) -> Graph:
    """A copy of the graph with the changes added to its weights."""
    merged = graph.copy()
    for name in list(merged.weights):
        if (change := changes.get(name.split("#")[0])) is not None:
            merged.weights[name] = Constant(merged.weights[name].load().float() + change)
    return merged


def slots_of(*slots: int) -> dict[str, torch.Tensor]:
    return {"adapter": torch.tensor([slots[i % len(slots)] for i in range(len(IDS))])}


FAMILIES = [
    "llama", "gemma3", "qwen3_moe", "mixtral", "gpt2", "phi3", "gpt_neox", "lfm2-short_convolutions",
    "qwen3_next-delta_rule", "bamba-state_space", "deepseek_v3-latent_grouped_routing", "cohere-interleaved_rotary",
]  # fmt: skip
# their special features are outside the products, to which adapters add
RARE = ("deepseek_v3-latent_grouped_routing", "qwen3_next-delta_rule", "cohere-interleaved_rotary", "gpt_neox")


@pytest.mark.parametrize("family", usual(FAMILIES, *RARE))
def test_as_if_the_change_were_in_the_weights(family: str, tiny: ModuleType, tmp_path: Path) -> None:
    graph = canonical(tiny, family, tmp_path / "model")
    adapted = with_room(graph, AdapterSlots(2, RANK))
    before = interpret(graph, IDS)
    assert torch.equal(interpret(adapted, IDS), before)  # no adapter is loaded, and no row uses one
    one, two = fill(adapted, 0), fill(adapted, 1, seed=5)
    assert set(one) <= {name.split("#")[0] for name in graph.weights}
    assert torch.equal(interpret(adapted, IDS), before)
    for slot, changes in enumerate((one, two)):
        expected = interpret(added(graph, changes), IDS)
        assert difference(expected, interpret(adapted, IDS, extras=slots_of(slot))) < 2e-5
        assert difference(expected, before) > 1e-2


def test_each_row_has_its_own(tiny: ModuleType, tmp_path: Path) -> None:
    """Rows without an adapter before those with one are the base model's: an aLoRA begins anywhere."""
    graph = canonical(tiny, "llama", tmp_path / "model")
    adapted = with_room(graph, AdapterSlots(1, RANK))
    fill(adapted, 0)
    found = interpret(adapted, IDS, extras={"adapter": torch.tensor([-1] * 7 + [0] * 6)})
    assert torch.equal(found[:7], interpret(graph, IDS)[:7])
    assert difference(found[7:], interpret(graph, IDS)[7:]) > 1e-2


def test_experts_that_are_named(tiny: ModuleType, tmp_path: Path) -> None:
    graph = canonical(tiny, "mixtral", tmp_path / "model")
    adapted = with_room(graph, AdapterSlots(2, RANK, ("experts.*",)))
    assert {site.experts for site in adapted.sites} == {4}
    changes = fill(adapted, 1)
    expected = interpret(added(graph, changes), IDS)
    assert difference(expected, interpret(adapted, IDS, extras=slots_of(1))) < 2e-5
    assert torch.equal(interpret(adapted, IDS), interpret(graph, IDS))


def test_scales_that_awq_has_folded_reach_the_adapter(tiny: ModuleType, tmp_path: Path) -> None:
    graph = canonical(tiny, "llama", tmp_path / "model")
    folded = graph.copy()
    options: dict[str, Any] = {"sequences": TEXTS, "rounds": False, "group": 32, "head": None}
    run_passes(folded, [QuantizeAwq(**options)], PassContext())
    adapted = with_room(folded, AdapterSlots(1, RANK))
    assert any(site.columns is not None for site in adapted.sites)
    assert any(site.rows is not None for site in adapted.sites)
    changes = fill(adapted, 0)
    expected = interpret(added(graph, changes), IDS)
    assert difference(expected, interpret(adapted, IDS, extras=slots_of(0))) < 2e-5


def test_targets_are_ends_of_names(tiny: ModuleType, tmp_path: Path) -> None:
    graph = canonical(tiny, "llama", tmp_path / "model")
    slots = read_adapter_slots("2x8:q_proj,layers.1.mlp.*")
    assert slots == AdapterSlots(2, 16, ("q_proj", "layers.1.mlp.*"))
    found = [site.parameter.removeprefix("model.layers.") for site in with_room(graph, slots).sites]
    mlp = [f"1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    assert sorted(found) == sorted(["0.self_attn.q_proj.weight", "1.self_attn.q_proj.weight", *mlp])
    with pytest.raises(UsageError, match="'v_prj' is no layer that can have adapters"):
        with_room(graph, AdapterSlots(1, 16, ("q_proj", "v_prj")))
    slots = read_adapter_slots("1x16+dora:embed_tokens,lm_head,all-linear")
    assert slots.dora and len(with_room(graph, slots).sites) == 2 + len(with_room(graph, AdapterSlots(1, 16)).sites)


@pytest.mark.parametrize(
    "text", ["8", "8x", "x16", "8x16:", "0x16", "8x0", "9999x16", "8x512", "8x16:a:b", "-1x8", "8x16+lora"]
)
def test_what_is_no_room(text: str) -> None:
    with pytest.raises(UsageError, match="--adapters"):
        read_adapter_slots(text)
