"""Graphs of models with a draft layer, their guesses, and the messages for drafters that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from icc.compiler.errors import IccError
from icc.compiler.frontend.load import load_graph
from icc.compiler.frontend.source.source import open_source
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret_outputs
from icc.compiler.speculate.choice import SpecChoice
from icc.compiler.speculate.draft_layer import load_draft_layer
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.speculate.insert_draft_layer import DraftLayer
from safetensors.torch import load_file, save_file

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]


def graph_with_layer(model: Path, spec: str) -> Graph:
    """The graph of a model and its draft layer, as it is compiled."""
    source = open_source(model)
    graph = load_graph(source)
    layer = load_draft_layer(SpecChoice.parse(spec), source, graph)
    passes = [*pipelines.canonicalize(), *pipelines.speculate((), 0, "none", "auto", layer), *pipelines.attention()]
    run_passes(graph, [*passes, *pipelines.fuse()], PassContext())
    return graph


def guesses(graph: Graph, text: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """The first guess after each prefix of a text from its second token on, and a chain of guesses after the whole
    text."""
    text, hidden = list(text), interpret_outputs(graph, list(text))["tap.hidden"].flatten(1)[:-1]
    first, chain = list[int](), list[int]()
    for _ in range(count):
        found = interpret_outputs(graph, text[1:], {"draft_hidden": hidden})
        first = first or found["draft_layer.logits"].argmax(-1).tolist()
        chain.append(int(found["draft_layer.logits"][-1].argmax()))
        text.append(chain[-1])
        hidden = torch.cat([hidden, found["draft_layer.hidden"][-1].reshape(1, -1)])
    return first, chain


def said_of(
    name: str, folder: Path, model: Graph, change: Change, changed: Path, insert: Callable[[DraftLayer], Any] = id
) -> str:
    """The one-line message of a compile for `folder`/drafter with its config.json and tensors changed, and the model in
    `folder`/model. name: the drafter's. changed: where the changed drafter is written. insert: applied to the layer."""
    own = folder / "drafter"
    config, tensors = json.loads((own / "config.json").read_text()), load_file(own / "model.safetensors")
    change(config, tensors)
    (changed / "config.json").write_text(json.dumps(config))
    save_file(tensors, changed / "model.safetensors")
    source = open_source(folder / "model")
    with pytest.raises(IccError) as error:
        insert(load_draft_layer(SpecChoice.parse(f"{name}:{changed}"), source, model))
    assert "\n" not in str(error.value)
    return str(error.value)
