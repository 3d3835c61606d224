"""Graph text: the parser reads what the printer writes, and errors name the line."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from graph_tracing import IDS, Value, aten, cat, difference, icc, trace
from icc.compiler.errors import GraphTextError
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.parser import parse_graph
from icc.compiler.graph.printer import print_graph
from icc.compiler.graph.verify import Stage, verify
from icc.compiler.weights.formats.affine import GroupAffine
from icc.compiler.weights.handles import Constant, RoundedWeight
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from sizes import soak

convert = torch.ops.prims.convert_element_type.default


def everything(positions: Value, x: Value, w: Value, v: Value, q: Value) -> Value:
    """Every kind of argument: lists, None, numbers of both kinds, infinities, dtypes, strings, weights."""
    values, chosen = icc.topk.default(icc.rms_norm.default(x, None, 1e-05), 4, True)
    turned = icc.linear.default(values, w, None) * 0.7978845608028654 / 2.0 + 2
    bounded = aten.clamp.default(turned, float("-inf"), 3)
    whole = convert(chosen, torch.float32) + convert(positions.view(-1, 1), torch.float32) * v
    joined = cat([bounded, whole, icc.linear.default(x, q, None)], 1)
    return icc.pointwise.default([joined, joined], "t0 = mul a0 2.5; t1 = add t0 a1")


INPUTS = {"positions": "", "x": "f32[T, 16]", "w": "bf16[4, 4]", "v": "f32[4]"}


def traced() -> Graph:
    return trace(everything, **INPUTS, q=RoundedWeight(Constant(torch.ones(4, 16)), GroupAffine(8, 4)))


def test_reads_back() -> None:
    text = print_graph(traced())
    graph = parse_graph(text)
    verify(graph, Stage.EXPORTED, "the parser")
    assert print_graph(graph) == text and graph.max_seq_len == 24
    assert "clamp(%8, -inf, 3)" in text and "0.7978845608028654" in text


def test_weights_have_the_values_of_their_names() -> None:
    """The tracer's values are those of seed 0, so both graphs compute the same."""
    graph = trace(lambda x, w: icc.linear.default(x, w, None) * 2.0, x="f32[T, 8]", w="bf16[4, 8]")
    text = print_graph(graph)
    assert difference(interpret(graph, IDS), interpret(parse_graph(text), IDS)) == 0
    assert difference(interpret(graph, IDS), interpret(parse_graph(text, seed=1), IDS)) > 0.1


def test_one_name_is_one_weight() -> None:
    graph = trace(lambda x, w: x * w + w, x="f32[T, 8]", w="f32[8]")
    read = parse_graph(print_graph(graph))
    assert list(read.weights) == ["x", "w"] and sum(n.op == "get_attr" for n in read.nodes) == 2


def test_modules_and_comments() -> None:
    graph = trace(lambda x: x * 2.0, x="f32[T, 8]")
    graph.output.meta["module"] = "model.norm"
    text = print_graph(graph, modules=True)
    assert print_graph(parse_graph(f"# a case\n\n{text}"), modules=True) == text


@pytest.mark.parametrize("family", ["deepseek_v3-latent_grouped_routing", *soak("llama", "gemma2", "mixtral", "gpt2")])
def test_models_read_back_after_every_phase(family: str, tiny: ModuleType, tmp_path: Path) -> None:
    config = tiny.tiny_configs()[family]
    tiny.save_tiny(config, tmp_path)
    graph = load_graph(tmp_path, 32)
    phases = [[], pipelines.canonicalize(), pipelines.quantize("rtn4", "int8", (), ())]
    phases += [pipelines.speculate((), 1, "rtn4", "int8"), pipelines.attention(), pipelines.fuse()]
    for phase in phases:
        run_passes(graph, phase, PassContext())
        text = print_graph(graph, modules=True)
        assert print_graph(parse_graph(text), modules=True) == text
    assert "exit.logits=" in text


WRONG = {
    "a graph begins with": ("graph(", "grape(", 1),
    "input colours: there is no element type 'i64'": ("%token_ids", "%colours: i64[T], %token_ids", 1),
    "input colours has the shape": ("%token_ids", "%colours: i32[T, 0], %token_ids", 1),
    "this is not `%name: type = op(arguments)`": (" = icc.rms_norm", " is icc.rms_norm", 3),
    "the type is f32[T, 16]": ("%1: f32[T, 16]", "%1: f32[T, 17]", 3),
    "%9 is not defined before it is used": ("rms_norm(%0", "rms_norm(%9", 3),
    "there is no op icc.rms_form": ("icc.rms_norm", "icc.rms_form", 3),
    "there is no op aten.mul.Matrix": ("aten.mul.Tensor(%5", "aten.mul.Matrix(%5", 8),
    "'q4h8' is not a way to store a weight": ("q4g8", "q4h8", 17),
    "a list does not end": ("[%9, %14, %15], 1", "[%9, %14, %15, 1", 18),
    "is not an output": ("return %17", "return %17 twice", 20),
}


@pytest.mark.parametrize("problem", WRONG)
def test_what_cannot_be_read_is_named(problem: str) -> None:
    old, new, line = WRONG[problem]
    text = print_graph(traced())
    assert old in text
    with pytest.raises(GraphTextError) as caught:
        parse_graph(text.replace(old, new, 1))
    assert problem in caught.value.message
    assert caught.value.line == line


def test_no_graph() -> None:
    with pytest.raises(GraphTextError, match="there is no graph"):
        parse_graph("# nothing\n")
