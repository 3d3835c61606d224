"""What holds for every pass of the pipelines, on traced models: numbers kept, verified, and nothing left for a second run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from graph_tracing import difference
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.printer import print_graph
from icc.compiler.graph.verify import Stage, verify
from icc.passes import pipelines
from icc.passes.base import Pass, PassContext
from icc.passes.manager import run_passes

FAMILIES = ["llama", "gemma2", "gpt_neox", "mixtral", "gptj-written_out_attention", "cohere-interleaved_rotary"]
IDS = torch.randint(3, 119, (13,), generator=torch.Generator().manual_seed(1)).tolist()
PIPELINE = [*pipelines.canonicalize(), *pipelines.attention(), *pipelines.fuse()]


def check_pass(item: Pass, graph: Graph) -> None:
    """Run it twice; the second run must find nothing to do."""
    before = interpret(graph, IDS)
    run_passes(graph, [item], PassContext())
    text = print_graph(graph)
    assert item.tolerance is not None
    error = difference(before, interpret(graph, IDS))
    assert error <= item.tolerance, f"{item.name} changed the logits by {error:.1e}"
    again = run_passes(graph, [item], PassContext())[0]
    assert not again.modified, f"a second {item.name} found {again.counts}"
    assert print_graph(graph) == text


@pytest.mark.parametrize("family", FAMILIES)
def test_each_pass_in_order(family: str, tiny: ModuleType, tmp_path: Path) -> None:
    tiny.save_tiny(tiny.tiny_configs()[family], tmp_path)
    graph = load_graph(tmp_path)
    for item in PIPELINE:
        check_pass(item, graph)
    verify(graph, Stage.OPTIMIZED, "the pipeline")
    whole, rows = interpret(graph, IDS), [7, 0, 12]
    assert difference(whole[rows], interpret(graph, IDS, rows)) < 1e-5


FUSED = {
    "llama": "embedding rms_norm linear paged_attention linear add_rms_norm linear pointwise linear add_rms_norm",
    "gpt_neox": "embedding layer_norm linear paged_attention linear layer_norm linear pointwise linear",
}


@pytest.mark.parametrize("family", FUSED)
def test_what_a_layer_becomes(family: str, tiny: ModuleType, tmp_path: Path) -> None:
    tiny.save_tiny(tiny.tiny_configs()[family], tmp_path)
    graph = load_graph(tmp_path)
    run_passes(graph, PIPELINE, PassContext())
    ops = [n.target.name() for n in graph.nodes if hasattr(n.target, "name")]
    kernels = [name.removeprefix("icc::") for name in ops if name.startswith("icc::")]
    assert " ".join(kernels).startswith(FUSED[family])


def test_the_pipeline_names_are_those_of_the_cli() -> None:
    names = {item.name for item in PIPELINE}
    assert names == {
        "dead-code", "fold-constants", "simplify", "eliminate-common", "position-tables", "recognize-norms",
        "recognize-rope", "paged-attention", "select-logit-rows", "merge-linears", "fuse-add-norm", "fuse-pointwise",
    }  # fmt: skip
