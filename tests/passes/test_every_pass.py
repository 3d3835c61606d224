"""Every pass of the pipelines on traced models: numbers do not change, graphs verify, and a second run changes
nothing."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from graph_tracing import difference
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.facts import Fact
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.printer import print_graph
from icc.compiler.graph.verify import Stage, verify
from icc.passes import pipelines
from icc.passes.base import Pass, PassContext
from icc.passes.manager import check_order, run_passes

FAMILIES = ["llama", "gemma2", "gpt_neox", "mixtral", "cohere-interleaved_rotary"]
IDS = torch.randint(3, 119, (13,), generator=torch.Generator().manual_seed(1)).tolist()
PIPELINE = [*pipelines.canonicalize(), *pipelines.attention(), *pipelines.fuse()]


def load(tiny: ModuleType, family: str, path: Path) -> Graph:
    torch.set_num_threads(1)
    tiny.save_tiny(tiny.tiny_configs()[family], path)
    return load_graph(path)


def check_pass(item: Pass, graph: Graph, before: torch.Tensor) -> torch.Tensor:
    """Run a pass twice; the second run must change nothing. Returns the logits afterwards."""
    kept = graph.facts - item.breaks
    report = run_passes(graph, [item], PassContext())[0]
    assert kept <= graph.facts, f"{item.name} breaks {kept - graph.facts} and does not say so"
    if not report.modified:
        return before
    text, after = print_graph(graph), interpret(graph, IDS)
    assert item.tolerance is not None
    error = difference(before, after)
    assert error <= item.tolerance, f"{item.name} changed the logits by {error:.1e}"
    again = item.run(graph, PassContext())
    assert not again.modified, f"a second {item.name} found {again.counts}"
    assert print_graph(graph) == text
    return after


@pytest.mark.parametrize("family", FAMILIES)
def test_each_pass_in_order(family: str, tiny: ModuleType, tmp_path: Path) -> None:
    graph = load(tiny, family, tmp_path)
    logits = interpret(graph, IDS)
    for item in PIPELINE:
        logits = check_pass(item, graph, logits)
    verify(graph, Stage.OPTIMIZED, "the pipeline")
    assert graph.facts == check_order(PIPELINE)
    rows = [7, 0, 12]
    assert difference(logits[rows], interpret(graph, IDS, rows)) < 1e-5


FUSED = {
    "llama": "embedding rms_norm linear paged_attention linear add_rms_norm linear pointwise linear add_rms_norm",
    "gpt_neox": "embedding layer_norm linear paged_attention linear layer_norm linear pointwise linear",
}


@pytest.mark.parametrize("family", FUSED)
def test_what_a_layer_becomes(family: str, tiny: ModuleType, tmp_path: Path) -> None:
    graph = load(tiny, family, tmp_path)
    run_passes(graph, PIPELINE, PassContext())
    ops = [n.target.name() for n in graph.nodes if hasattr(n.target, "name")]
    kernels = [name.removeprefix("icc::") for name in ops if name.startswith("icc::")]
    assert " ".join(kernels).startswith(FUSED[family])


@pytest.mark.parametrize("method", ["none", "rtn4", "awq4", "gptq4"])
@pytest.mark.parametrize("layers", [0, 1])
def test_the_pipeline_keeps_its_order(method: str, layers: int) -> None:
    """The phases run in the driver's order, and the result has the facts that lowering requires."""
    phases = [
        pipelines.canonicalize(),
        pipelines.quantize(method, "int8", (), ()),
        pipelines.speculate((), layers, method, "int8"),
        pipelines.attention(),
        pipelines.fuse(),
    ]
    facts = check_order([item for phase in phases for item in phase])
    assert facts >= {Fact.FOLDED, Fact.PAGED, Fact.LOGIT_ROWS, Fact.OPTIMIZED}


def test_the_pipeline_names_are_those_of_the_cli() -> None:
    names = {item.name for item in PIPELINE}
    assert names == {
        "dead-code", "fold-constants", "simplify", "eliminate-common", "position-tables", "recognize-norms",
        "recognize-rope", "paged-attention", "select-logit-rows", "sort-columns", "merge-linears", "fuse-add-norm",
        "fuse-pointwise", "absorb-projections",
    }  # fmt: skip
