"""sequence: bit-equal to whole sums, in lockstep, with other ranks' rows poisoned; sums that stay whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.printer import print_graph
from icc.compiler.ops import OPS
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import PassReport, run_passes
from icc.passes.parallel.divide import DivideAmongRanks
from icc.passes.parallel.sequence import DivideRows
from sizes import soak

IDS = [3, 17, 101, 44, 8, 8, 63, 2, 90, 11, 12]
MORE = [
    "mixtral", "gpt2", "gpt_oss", "deepseek_v3-latent_grouped_routing", "qwen3_next-delta_rule", "bamba-state_space",
    "jamba-selective_scan", "lfm2-short_convolutions", "falcon-written_out_mqa", "phi3", "opt", "gpt_neox", "gemma2",
]  # fmt: skip
# Values would be gathered more often than sums are divided: two norms read each sum, or four ranks cannot divide some
# layers, which every rank then computes whole.
WHOLE = {
    ("gpt_neox", 2), ("gpt_neox", 4), ("qwen3_next-delta_rule", 4), ("bamba-state_space", 4),
    ("falcon-written_out_mqa", 4),
}  # fmt: skip
ODD = "-odd_sizes"  # two ranks can divide only the embedding


@pytest.fixture(scope="module")
def divided(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Graph]:
    """A function that gives a tiny family's graph divided among ranks."""
    known: dict[str, Graph] = {}

    def make(name: str, ranks: int) -> Graph:
        if name not in known:
            path = tmp_path_factory.mktemp("model")
            config = tiny.tiny_configs()[name.removesuffix(ODD)]
            if name.endswith(ODD):
                sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 97}
                config.update(sizes)
            tiny.save_tiny(config, path)
            known[name] = load_graph(path, 64)
            run_passes(known[name], [*pipelines.canonicalize(), *pipelines.attention()], PassContext())
        graph = known[name].copy()
        run_passes(graph, [DivideAmongRanks(ranks, True, True)], PassContext())
        return graph

    return make


def by_rows(graph: Graph, rows: int = 1) -> tuple[Graph, PassReport]:
    own = graph.copy()
    [report] = run_passes(own, [DivideRows(rows)], PassContext())
    return own, report


def count(graph: Graph, op: str) -> int:
    return sum(node.target is OPS[op].overload for node in graph.nodes)


@pytest.mark.parametrize("name", ["llama", "gemma3", *soak(*MORE)])
def test_the_bits_of_whole_sums(name: str, divided: Callable[[str, int], Graph]) -> None:
    """11 rows on 2 and 4 ranks: bit-equal with unequal parts, also after fusion; a second run changes nothing."""
    for ranks in (2, 4):
        graph = divided(name, ranks)
        wanted = interpret(graph, IDS)
        own, report = by_rows(graph)
        assert report.counts["sums by rows"] == (found := count(own, "reduce_scatter"))
        assert (found > 0) == ((name, ranks) not in WHOLE)
        assert torch.equal(interpret(own, IDS), wanted)
        text = print_graph(own)
        assert not DivideRows(1).run(own, PassContext()).modified and print_graph(own) == text
        run_passes(graph, pipelines.fuse(), PassContext())
        run_passes(own, pipelines.fuse(), PassContext())
        assert torch.equal(interpret(own, IDS), interpret(graph, IDS))


def test_a_decoder_gathers_twice_per_layer(divided: Callable[[str, int], Graph]) -> None:
    """Before the products of attention and of the MLP, and once for the logit rows; no sum stays whole."""
    graph = divided("llama", 2)
    own, report = by_rows(graph)
    assert count(graph, "all_reduce") == 5 == report.counts["sums by rows"] and not count(own, "all_reduce")
    assert report.counts["gathered"] == count(own, "all_gather_rows") == 5


def test_looked_up_words_alone_stay_a_sum(divided: Callable[[str, int], Graph]) -> None:
    """If only the embedding is divided, its rows would be gathered for the norm and again for the next layer's sum: one
    whole sum costs less."""
    graph = divided("llama" + ODD, 2)
    assert count(graph, "all_reduce") == 1
    own, context = graph.copy(), PassContext()
    assert not DivideRows(1).run(own, context).modified and print_graph(own) == print_graph(graph)
    assert "gathered oftener" in context.refusals[0].reason


def test_few_rows_are_not_divided(divided: Callable[[str, int], Graph]) -> None:
    graph = divided("llama", 2)
    own, _ = by_rows(graph, rows=12)
    assert torch.equal(interpret(own, IDS), interpret(graph, IDS))


def test_a_row_that_is_not_gathered_shows(divided: Callable[[str, int], Graph]) -> None:
    own, _ = by_rows(divided("llama", 2))
    gathered = next(node for node in own.nodes if node.target is OPS["all_gather_rows"].overload)
    gathered.replace_all_uses_with(gathered.args[0])  # type: ignore[arg-type]
    assert interpret(own, IDS).isnan().any()


def test_one_rank_has_nothing_to_divide(divided: Callable[[str, int], Graph]) -> None:
    graph = divided("llama", 1)
    assert not by_rows(graph)[1].modified
