"""Folding of scales by data flow: which layers share a scale, which weights take it, and that no function changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.passes.quantize.fold import FoldGroup, apply_fold, fold_group
from icc.passes.quantize.select import EXPERT, LINEAR, plain_name, retype

IDS = [3, 17, 4, 44, 9, 2, 11]


def linears(graph: Graph) -> list:
    return [n for n in graph.nodes if n.target in (LINEAR, EXPERT)]


def names(group: FoldGroup) -> tuple[list[str], list[str]]:
    """The names of the weights of consumers, and of producers."""
    consumers = [plain_name(end.node.args[1]) for end in group.consumers]
    return consumers, [plain_name(end.node.args[end.arg]) for end in group.producers]


def fold_all(graph: Graph) -> tuple[list[FoldGroup], list[str]]:
    """Fold random scales everywhere; returns the groups and the refusals."""
    scales = torch.Generator().manual_seed(5)
    done, groups, refused = set(), [], []
    for node in linears(graph):
        group = fold_group(graph, node, {}) if node not in done else None
        if group is None:
            continue
        if not group.count:
            refused.append(group.reason)
            continue
        done.update(end.node for end in group.consumers)
        groups.append(group)
        apply_fold(graph, group, torch.rand(group.count, generator=scales) * 1.5 + 0.5)
    retype(graph)
    return groups, refused


def assert_same_function(graph: Graph, ids: list[int] = IDS) -> tuple[list[FoldGroup], list[str]]:
    before = interpret(graph, ids)
    result = fold_all(graph)
    after = interpret(graph, ids)
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()
    return result


@pytest.mark.parametrize(
    ("family", "folds", "refusals"),
    [
        ("llama", 9, set()),
        ("gemma2", 9, set()),
        ("opt", 9, set()),
        ("gpt2", 7, {"its input is also read by aten.pow.Tensor_Scalar"}),
        ("mixtral", 9, set()),
    ],
)
def test_models_keep_their_function(
    traced: Callable[[str], Graph], family: str, folds: int, refusals: set[str]
) -> None:
    graph = traced(family)
    groups, refused = assert_same_function(graph, list(range(3, 25)))
    assert len(groups) == folds
    assert all(group.producers for group in groups)
    # reasons depend on how the activation is written, so only check that each refusal has one
    assert bool(refused) == bool(refusals) and all(refused)


def test_llama_groups(traced: Callable[[str], Graph]) -> None:
    graph = traced("llama")
    found = {names(fold_group(graph, node, {}))[0][0]: fold_group(graph, node, {}) for node in linears(graph)[:7]}
    attn, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    norms = ["model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight"]
    assert {k: names(v) for k, v in found.items()} == {
        attn + "q_proj.weight": ([attn + f"{p}_proj.weight" for p in "qkv"], [norms[0]]),
        attn + "o_proj.weight": ([attn + "o_proj.weight"], [attn + "v_proj.weight"]),
        mlp + "gate_proj.weight": ([mlp + "gate_proj.weight", mlp + "up_proj.weight"], [norms[1]]),
        mlp + "down_proj.weight": ([mlp + "down_proj.weight"], [mlp + "up_proj.weight"]),
    }
    o_proj = found[attn + "o_proj.weight"]
    assert o_proj.count == 32, "4 query heads share the channels of 2 KV heads of 16"
    classes = o_proj.consumers[0].classes.reshape(4, 16)
    assert torch.equal(classes[0], classes[1]) and torch.equal(classes[2], classes[3])
    assert not (classes[0] == classes[2]).any()


def test_unrecognized_norm_and_constant_vector(builder) -> None:
    b = builder
    x = b.embed(64)
    square = b.op("reduce", b.aten("mul.Tensor", x, x), "mean", 1)
    inverse = b.aten("rsqrt", b.aten("add.Tensor", b.aten("view", square, [-1, 1]), 1e-6))
    norm = b.aten("mul.Tensor", b.weight("norm", 64, scale=1.0), b.aten("mul.Tensor", x, inverse))
    h = b.aten("mul.Tensor", b.linear(norm, "first", 32, 64), b.weight("layer_scale", 32))
    graph = b.finish(b.linear(h, "second", 48, 32))
    groups, refused = assert_same_function(graph)
    assert [names(g) for g in groups] == [(["first"], ["norm"]), (["second"], ["layer_scale"])]
    assert not refused


def test_norm_without_weight_gets_one(builder) -> None:
    b = builder
    x = b.op("layer_norm", b.embed(64), None, None, 1e-5)
    graph = b.finish(b.linear(x, "only", 48, 64))
    assert_same_function(graph)
    assert "norm_scale" in graph.weights


def test_slices_views_cat_and_bias(builder) -> None:
    b = builder
    merged = b.linear(b.aten("tanh", b.embed(64)), "merged", 96, 64, bias=True)
    gate, up = (b.aten("slice.Tensor", merged, 1, i * 48, i * 48 + 48, 1) for i in (0, 1))
    h = b.aten("mul.Tensor", b.aten("silu", gate), up)
    turned = b.aten("permute", b.aten("view", h, [-1, 6, 8]), [0, 2, 1])
    halves = [b.aten("slice.Tensor", turned, 1, i, i + 4, 1) for i in (4, 0)]
    h = b.aten("view", b.aten("permute", b.aten("cat", halves, 1), [0, 2, 1]), [-1, 48])
    graph = b.finish(b.linear(b.aten("relu", b.aten("neg", h)), "down", 48, 48))
    groups, refused = assert_same_function(graph)
    assert [names(g) for g in groups] == [(["down"], ["merged"])]
    assert refused == ["its input comes through aten.tanh"]
    producer = groups[0].producers[0].classes
    assert (producer[:48] == -1).all() and (producer[48:] >= 0).all(), "only the rows of `up` are scaled"


def test_partly_foldable_input(builder) -> None:
    b = builder
    x = b.embed(32)
    h = b.aten("cat", [x, b.linear(b.aten("tanh", x), "first", 32, 32)], 1)
    graph = b.finish(b.linear(h, "second", 48, 64))
    groups, _ = assert_same_function(graph)
    assert groups[-1].count == 32
    assert (groups[-1].consumers[0].classes[:32] == -1).all()


def test_norm_output_in_the_residual_stream_is_refused(builder) -> None:
    b = builder
    x = b.op("rms_norm", b.embed(64), b.weight("norm", 64, scale=1.0), 1e-6)
    h = b.aten("add.Tensor", x, b.linear(x, "inner", 64, 64))
    graph = b.finish(b.linear(b.aten("tanh", h), "head", 48, 64))
    _, refused = assert_same_function(graph)
    assert refused == ["its input is also read by aten.tanh", "its input comes through aten.tanh"]


def test_residual_stream_that_ends_in_linears_is_scaled_as_a_whole(builder) -> None:
    b = builder
    x = b.op("rms_norm", b.embed(64), b.weight("norm", 64, scale=1.0), 1e-6)
    h = b.aten("add.Tensor", x, b.linear(x, "inner", 64, 64))
    graph = b.finish(b.linear(h, "head", 48, 64))
    groups, refused = assert_same_function(graph)
    assert [names(g) for g in groups] == [(["inner", "head"], ["norm", "inner"])] and not refused


def test_blocked_layers_take_no_scale(builder) -> None:
    b = builder
    x = b.op("rms_norm", b.embed(64), b.weight("norm", 64, scale=1.0), 1e-6)
    graph = b.finish(b.linear(b.linear(x, "first", 32, 64), "second", 48, 32))
    first, second = linears(graph)
    assert fold_group(graph, first, {first: "shared"}).reason == "shared"
    assert fold_group(graph, second, {first: "shared"}).reason == "shared"
    assert fold_group(graph, second, {}).count == 32
