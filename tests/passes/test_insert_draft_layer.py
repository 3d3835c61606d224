"""insert-draft-layer: taps after layers, their projection to one hidden state, and a separate vocabulary of the draft
layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graph_tracing import IDS, Value, apply, attention, difference, icc, random, trace
from icc.compiler.errors import UsageError
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret, interpret_outputs
from icc.compiler.ops import AttentionSpec
from icc.compiler.weights.handles import Constant
from icc.passes import pipelines
from icc.passes.attention.select_logit_rows import SelectLogitRows
from icc.passes.base import PassContext
from icc.passes.drafting import Clusters, Taps
from icc.passes.manager import run_passes
from icc.passes.speculate.insert_draft_layer import DraftLayer, InsertDraftLayer
from icc.runtime.format.batch import BatchArray
from icc.runtime.format.speculation import DRAFT_HIDDEN

VOCABULARY = torch.tensor([2, 3, 5, 11])
PROJECTION, NORMS = random("fc", [8, 24]), [1 + 0.1 * random(f"norm{i}", [8]) for i in range(3)]
TAPS = Taps((1, 3, 4), Constant(PROJECTION), tuple(Constant(norm) for norm in NORMS), eps=1e-5)


def layer(x: Value, number: int, w: Value) -> Value:
    """Attention and a residual product, as a model's layer would be traced."""
    heads = icc.rms_norm.default(x, w, 1e-5).view(-1, 2, 4)
    x = x + attention(heads, heads, heads, AttentionSpec(number, 0.5)).view(-1, 8)
    x = x + torch.ops.aten.tanh.default(x)
    x.node.meta["module"] = f"model.layers.{number}"
    return x


def model(layers: int, hidden: bool = False) -> Graph:
    """The graph of a model, or of its hidden states after the layers."""

    def fn(x: Value, w: Value, norm: Value, head: Value) -> Value:
        for number in range(layers):
            x = layer(x, number, w)
        return x if hidden else icc.linear.default(icc.rms_norm.default(x, norm, 1e-5), head, None)

    return trace(fn, x="f32[T, 8]", w="f32[8]", norm="f32[8]", head="f32[16, 8]")


def drafter(tokens: int = len(VOCABULARY)) -> Graph:
    def fn(draft_hidden: Value, x: Value, w: Value, last: Value, own: Value) -> Value:
        x = layer(draft_hidden + x, 0, w)
        return icc.linear.default(icc.rms_norm.default(x, last, 1e-5), own, None)

    given = BatchArray(DRAFT_HIDDEN, ("T", 8), "f32")
    return trace(fn, draft_hidden=given, x="f32[T, 8]", w="f32[8]", last="f32[8]", own=f"f32[{tokens}, 8]")


LAYER = DraftLayer(drafter(), TAPS, VOCABULARY, normed=False)


def test_taps_lie_behind_the_layers() -> None:
    """Also after the last layer, before the final norm; each tap is normed, and the projection reads all."""
    graph = apply(InsertDraftLayer(LAYER), model(4)).graph
    parts = [interpret(model(layers, hidden=True), IDS) for layers in TAPS.layers]
    normed = [torch.nn.functional.rms_norm(x, (8,), norm, 1e-5) for x, norm in zip(parts, NORMS, strict=True)]
    found = interpret_outputs(graph, IDS)
    assert difference(torch.cat(normed, -1) @ PROJECTION.T, found["tap.hidden"]) < 1e-5
    assert torch.equal(found["logits"], interpret(model(4), IDS))


def test_joined_taps_may_be_normed() -> None:
    norm = 1 + 0.1 * random("joined", [24])
    taps = replace(TAPS, norms=(), joined_norm=Constant(norm))
    graph = apply(InsertDraftLayer(replace(LAYER, taps=taps)), model(4)).graph
    joined = torch.cat([interpret(model(layers, hidden=True), IDS) for layers in taps.layers], -1)
    wanted = torch.nn.functional.rms_norm(joined, (24,), norm, 1e-5) @ PROJECTION.T
    assert difference(wanted, interpret_outputs(graph, IDS)["tap.hidden"]) < 1e-5


@pytest.mark.parametrize("normed", [False, True])
def test_logits_are_spread_over_the_models_tokens(normed: bool) -> None:
    """Tokens outside the layer's vocabulary cannot be guessed; a chain continues from its hidden state, normed or
    not."""
    graph = apply(InsertDraftLayer(replace(LAYER, normed=normed)), model(4)).graph
    extras = {DRAFT_HIDDEN: random("hidden", [len(IDS), 8])}
    found, own = interpret_outputs(graph, IDS, extras), interpret(drafter(), IDS, extras=extras)
    logits = found["draft_layer.logits"]
    assert difference(own, logits[:, VOCABULARY]) < 1e-6
    assert logits[0].isfinite().nonzero()[:, 0].tolist() == VOCABULARY.tolist()
    weights = {str(n.target): drafter().weight(n).load() for n in drafter().nodes if n.op == "get_attr"}
    states = found["draft_layer.hidden"]
    normed_states = states if normed else torch.nn.functional.rms_norm(states, (8,), weights["last"], 1e-5)
    assert difference(own, normed_states @ weights["own"].T) < 1e-5


def test_later_passes_keep_both_sections() -> None:
    graph, extras = model(4), {DRAFT_HIDDEN: random("hidden", [len(IDS), 8])}
    wanted = interpret_outputs(apply(InsertDraftLayer(LAYER), model(4)).graph, IDS, extras)
    run_passes(graph, [InsertDraftLayer(LAYER), SelectLogitRows(), *pipelines.fuse()], PassContext())
    found = interpret_outputs(graph, IDS, extras)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        known = value.isfinite()
        assert difference(value[known], found[name][known]) < 1e-5 and torch.equal(known, found[name].isfinite())


def test_refusals() -> None:
    for layers, asked in ((3, 4), (2, 3)):
        with pytest.raises(UsageError, match=f"behind {asked} layers are asked for, the model has {layers}"):
            run_passes(model(layers), [InsertDraftLayer(LAYER)], PassContext())
    with pytest.raises(UsageError, match="another vocabulary than the model"):
        run_passes(model(4), [InsertDraftLayer(replace(LAYER, vocabulary=None))], PassContext())
    narrow = replace(TAPS, projection=Constant(random("narrow", [8, 12])))
    with pytest.raises(UsageError, match="layers end does not show as one value of 4"):
        run_passes(model(4), [InsertDraftLayer(replace(LAYER, taps=narrow))], PassContext())


def test_tokens_of_the_nearest_clusters_are_guessed() -> None:
    """Four clusters of four tokens; each row scores the tokens of two clusters."""
    of, centroids = torch.arange(16) % 4, random("centroids", [4, 8])
    whole = DraftLayer(drafter(16), TAPS)
    some = replace(whole, clusters=Clusters(Constant(centroids), of, 2))
    every, found = (interpret_outputs(apply(InsertDraftLayer(one), model(4)).graph, IDS) for one in (whole, some))
    best = (every["draft_layer.hidden"] @ centroids.T).topk(2).indices
    scored = (of[None, :, None] == best[:, None, :]).any(-1)
    assert torch.equal(found["draft_layer.logits"].isfinite(), scored)
    assert torch.equal(found["draft_layer.logits"][scored], every["draft_layer.logits"][scored])
