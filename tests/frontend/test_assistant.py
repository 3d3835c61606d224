"""An assistant that reads its model's keys and values, as a graph: it makes the guesses of transformers' class."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from assistant_models import CASES, WINDOW, save_pair
from draft_graphs import said_of
from icc.compiler.errors import UsageError
from icc.compiler.frontend.load import load_graph
from icc.compiler.frontend.source.source import open_source
from icc.compiler.graph.graph import Graph, attention_spec, layer_of
from icc.compiler.graph.interpret import interpret_outputs
from icc.compiler.speculate.choice import SpecChoice
from icc.compiler.speculate.draft_layer import load_draft_layer
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.speculate.insert_draft_layer import DraftLayer
from tiny_models import GQA, save_tiny
from transformers import LlamaConfig

pytestmark = pytest.mark.slow


class Pair:
    """An assistant, its model, and the graph of both."""

    def __init__(self, case: str, path: Path) -> None:
        self.path, self.reference = path, save_pair(case, path)

    @cached_property
    def plain(self) -> Graph:
        graph = load_graph(self.path / "model")
        run_passes(graph, pipelines.canonicalize(), PassContext())
        return graph

    @cached_property
    def graph(self) -> Graph:
        source, graph = open_source(self.path / "model"), self.plain.copy()
        layer = load_draft_layer(SpecChoice.parse(f"assistant:{self.path / 'drafter'}"), source, graph)
        passes = [*pipelines.speculate((), 0, "none", "auto", layer), *pipelines.attention(), *pipelines.fuse()]
        run_passes(graph, passes, PassContext())
        return graph


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A function that gives the pair of a name, created once."""
    folder = tmp_path_factory.mktemp("assistant")
    return cache(lambda name: Pair(name, folder / name))


@pytest.fixture
def pair(pairs: Callable[[str], Pair]) -> Pair:
    return pairs("shared")


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("token", [5, 101])
def test_first_guesses_are_those_of_transformers(pairs: Callable[[str], Pair], name: str, token: int) -> None:
    """After each position of a text that repeats one token, and so the sampled token too; the text is longer than the
    window."""
    pair, text = pairs(name), [token] * 20
    hidden = interpret_outputs(pair.graph, text)["tap.hidden"]
    logits = interpret_outputs(pair.graph, text, {"draft_hidden": hidden})["draft_layer.logits"]
    for n in (1, 2, 7, 8, 9, 13, 20):
        expected = pair.reference.logits([*text[:n], token], 1)[0]
        scored = logits[n - 1].isfinite()
        assert int(scored.sum()) == (30 if name == "clusters" else 120)
        torch.testing.assert_close(logits[n - 1][scored], expected[scored], rtol=1e-4, atol=1e-4)
        assert logits[n - 1].argmax() == expected.argmax()


def test_its_layers_keep_nothing(pair: Pair) -> None:
    """Each reads the cache of the model's last layer of its kind that has its own keys and values, with that layer's
    mask."""
    nodes = pair.graph.attention_nodes
    own = [node for node in nodes if node in pair.graph.section_nodes("draft_layer")]
    assert [layer_of(node) for node in own] == [2, 3, 2]
    assert [attention_spec(node).mask.window for node in own] == [0, WINDOW, 0]
    assert len(nodes) == 9


@pytest.fixture
def broken(pair: Pair, tmp_path: Path) -> Callable[..., str]:
    """A function that gives the one-line error of a compile with a changed assistant."""

    def insert(layer: DraftLayer) -> None:
        run_passes(pair.plain.copy(), pipelines.speculate((), 0, "none", "auto", layer), PassContext())

    return lambda change: said_of("assistant", pair.path, pair.plain, change, tmp_path, insert)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, t: c.update(model_type="llama"), "field 'model_type' is 'llama': not an assistant"),
        (lambda c, t: c.update(backbone_hidden_size=32), "backbone_hidden_size is 32, the model's is 64"),
        (lambda c, t: c["text_config"].update(vocab_size=119), "vocab_size is 119, the model's is 120"),
        (lambda c, t: c.update(shift=1), "field 'shift' is not known"),
        (lambda c, t: c["text_config"].update(shift=1), "field 'text_config.shift' is not known"),
        (lambda c, t: c["text_config"].update(num_kv_shared_layers=1), "must be shared"),
        (lambda c, t: c["text_config"].update(hidden_size="x"), "hidden_size"),
        (lambda c, t: t.pop("pre_projection.weight"), "tensor 'pre_projection.weight': is missing"),
        (lambda c, t: t.update({"pre_projection.weight": torch.zeros(48, 64)}), r"has shape \[48, 64\]"),
        (
            lambda c, t: (
                c.update(use_ordered_embeddings=True, num_centroids=12, centroid_intermediate_top_k=3),
                t.update({"masked_embedding.centroids.weight": torch.zeros(12, 48),
                          "masked_embedding.token_ordering": torch.zeros(120, dtype=torch.int64)}),
            ),
            "does not name each of 120 tokens once",
        ),
        (lambda c, t: c.update(use_ordered_embeddings=True, num_centroids=7), "'num_centroids' is 7, of 120 tokens"),
        (lambda c, t: t.update(extra=torch.zeros(3)), "tensor 'extra' is not known"),
        (
            lambda c, t: c["text_config"].update(num_key_value_heads=4),
            r"reads keys of \[4, 32\], the model's are \[2, 32\]",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(broken: Callable[..., str], change: Any, message: str) -> None:
    assert re.search(message, broken(change))


def test_a_model_without_such_layers_is_refused(pair: Pair, tmp_path: Path) -> None:
    save_tiny(LlamaConfig(**GQA), tmp_path)
    source = open_source(tmp_path)
    with pytest.raises(UsageError, match="it reads a layer of full_attention, the model has none"):
        load_draft_layer(SpecChoice.parse(f"assistant:{pair.path / 'drafter'}"), source, load_graph(source))


def test_a_directory_is_needed() -> None:
    for text in ("assistant", "assistant:"):
        with pytest.raises(UsageError, match="not known at compile time"):
            SpecChoice.parse(text)
