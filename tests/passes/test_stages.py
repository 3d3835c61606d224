"""stages: graphs cut into consecutive parts, in lockstep; the places of cuts; the rank of each step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from icc.compiler.backends.registry import backend_for
from icc.compiler.caches import lower_options
from icc.compiler.engine.manifest import make_limits
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.printer import print_graph
from icc.compiler.options import CompileOptions
from icc.compiler.program.lower import lower
from icc.compiler.program.program import Program
from icc.compiler.program.stages import stages_of, weights_of
from icc.compiler.program.steps.collective import Transfer
from icc.compiler.targets import find_target
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import PassReport, run_passes
from icc.passes.parallel.divide import DivideAmongRanks
from icc.passes.parallel.stages import CutIntoStages
from sizes import soak

IDS = [3, 17, 101, 44, 8, 8, 63, 2, 90, 11, 12]
FAMILIES = ["llama", "gemma3"]
MORE = [
    "mixtral", "gpt2", "gpt_oss", "deepseek_v3-latent_grouped_routing", "qwen3_next-delta_rule", "bamba-state_space",
    "jamba-selective_scan", "lfm2-short_convolutions", "falcon-written_out_mqa", "phi3", "opt", "gpt_neox", "gemma2",
]  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Graph]:
    """A function that gives a tiny family's graph after the phase `attention`."""
    known: dict[str, Graph] = {}

    def make(name: str) -> Graph:
        if name not in known:
            path = tmp_path_factory.mktemp("model")
            tiny.save_tiny(tiny.tiny_configs()[name], path)
            graph = load_graph(path, 64)
            run_passes(graph, [*pipelines.canonicalize(), *pipelines.attention()], PassContext())
            known[name] = graph
        return known[name]

    return make


def cut(graph: Graph, stages: int) -> tuple[Graph, PassReport]:
    own = graph.copy()
    [report] = run_passes(own, [CutIntoStages(stages)], PassContext())
    return own, report


def lowered(graph: Graph) -> Program:
    run_passes(graph, pipelines.fuse(), PassContext())
    options = CompileOptions("m", "e", target="cpu")  # type: ignore[arg-type]
    backend = backend_for(find_target("cpu"), graph.info.weight_dtype)
    return lower(graph, lower_options(graph, options, backend, make_limits(graph, options))).program


@pytest.mark.parametrize("name", [*FAMILIES, *soak(*MORE)])
def test_stages_in_lockstep_give_the_bits_of_one_rank(name: str, prepared: Callable[..., Graph]) -> None:
    """In the interpreter, values that a stage does not receive are NaN. Each cache and each weight belongs to one rank,
    except tied weights; every step runs, and only steps over positions alone run twice."""
    graph = prepared(name)
    wanted = interpret(graph, IDS)
    own, report = cut(graph, 2)
    assert report.counts["cuts"] == 1 and torch.equal(interpret(own, IDS), wanted)
    text = print_graph(own)
    assert not CutIntoStages(2).run(own, PassContext()).modified and print_graph(own) == text
    alone = graph.copy()
    program = lowered(own)
    assert torch.equal(interpret(own, IDS), interpret(_fused(alone), IDS))
    ranks = stages_of(program)
    layers: dict[int, set[int]] = {}
    for step, stages in zip(program.steps, ranks, strict=True):
        assert stages, f"nobody runs {step}"
        assert not isinstance(step, Transfer) or stages == {step.stage - 1, step.stage}
        if step.layer >= 0:
            layers.setdefault(step.layer, set()).update(stages)
    assert all(len(stages) == 1 for stages in layers.values()) and set().union(*layers.values()) == {0, 1}
    both = weights_of(program, 0) & weights_of(program, 1)
    assert weights_of(program, 0) | weights_of(program, 1) == set(program.weights)
    assert all(re.search("embed|lm_head|wte|rotary|position|table", name) for name in both), both


def _fused(graph: Graph) -> Graph:
    run_passes(graph, pipelines.fuse(), PassContext())
    return graph


@pytest.mark.parametrize("name", [*FAMILIES, *soak(*MORE)])
def test_stages_of_several_ranks_in_lockstep(name: str, prepared: Callable[..., Graph]) -> None:
    """Each stage is divided among two ranks, which pass values on to their counterparts: bit-equal to two ranks."""
    graph = prepared(name).copy()
    run_passes(graph, [DivideAmongRanks(2, True, True)], PassContext())
    wanted = interpret(graph, IDS)
    own, report = cut(graph, 2)
    assert report.counts["cuts"] == 1 and (own.ranks, own.stages, own.parts) == (4, 2, 2)
    assert torch.equal(interpret(own, IDS), wanted)


def test_one_value_crosses_between_layers(prepared: Callable[..., Graph]) -> None:
    _, report = cut(prepared("llama"), 2)
    assert report.counts == {"cuts": 1, "values that cross": 1}
    first, second = report.refusals
    assert first.reason.startswith("stage 0 begins here; modelled ") and "% of a token's cost" in first.reason
    hidden = prepared("llama").info.hidden_size
    assert f"stage 1 begins here, takes {4 * hidden} bytes per token; modelled" in second.reason
    assert ".layers." in second.node


def test_stages_are_of_like_cost(prepared: Callable[..., Graph]) -> None:
    """The given costs decide the cut: after the first product, or before the last."""
    graph = prepared("llama")
    products = [node for node in graph.nodes if "linear" in str(node.target)]
    for heavy, stage in ((products[0], 0), (products[-1], 1)):
        own = graph.copy()
        ctx = PassContext()
        CutIntoStages(2, lambda g, n, heavy=heavy: 100.0 if n.name == heavy.name else 1.0).run(own, ctx)
        shares = [int(refusal.reason.split(", ")[-1].split(" ")[0]) for refusal in ctx.refusals]
        assert shares[stage] > shares[1 - stage]


def test_more_stages_than_parts_are_refused(prepared: Callable[..., Graph]) -> None:
    graph = prepared("llama")
    own, report = cut(graph, 60)
    assert not report.modified and own.ranks == 1
    assert report.refusals[0].reason == "there are no 60 parts of the graph"
    four, report = cut(graph, 4)
    assert report.counts["cuts"] == 3 and torch.equal(interpret(four, IDS), interpret(graph, IDS))
