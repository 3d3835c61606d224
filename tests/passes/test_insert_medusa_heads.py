"""insert-medusa-heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from expecttest import assert_expected_inline
from graph_tracing import IDS, Value, apply, aten, difference, icc, random, trace
from icc.compiler.errors import HeadMismatch, PassError
from icc.compiler.graph.interpret import interpret, interpret_outputs
from icc.compiler.graph.printer import print_graph
from icc.compiler.weights.handles import Constant, QuantizedWeight, Weight
from icc.passes import pipelines
from icc.passes.attention.select_logit_rows import SelectLogitRows
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.speculate.insert_medusa_heads import InsertMedusaHeads
from torch.nn.functional import silu


@dataclass
class Head:
    blocks: Sequence[tuple[Weight, Weight]]
    lm_head: Weight | None = None
    projection: Weight | None = None


def head(number: int, layers: int = 1, own: bool = False, hidden: int = 8, vocab: int = 16) -> Head:
    blocks = [
        (Constant(random(f"w{number}{i}", (hidden, hidden))), Constant(random(f"b{number}{i}", (hidden,))))
        for i in range(layers)
    ]
    return Head(tuple(blocks), Constant(random(f"h{number}", (vocab, hidden))) if own else None)


def model(x: Value, w: Value, head: Value) -> Value:
    return icc.linear.default(icc.rms_norm.default(x, w, 1e-5), head, None) / 30.0


INPUTS = {"x": "f32[T, 8]", "w": "f32[8]", "head": "f32[16, 8]"}


def test_shared_lm_head() -> None:
    done = apply(InsertMedusaHeads((head(0), head(1)), ranks=3), trace(model, **INPUTS))
    assert_expected_inline(
        done.text[done.text.index("--") :],
        """\
-- insert-medusa-heads
graph(%token_ids: i64[T]):
  %0: f32[T, 8] = icc.embedding(%token_ids, @x: f32[16, 8])
  %1: f32[T, 8] = icc.rms_norm(%0, @w: f32[8], 1e-05)
  %2: f32[T, 16] = icc.linear(%1, @head: f32[16, 8], None)
  %3: f32[T, 16] = aten.div.Tensor(%2, 30.0)
  %4: f32[T, 8] = icc.linear(%1, @medusa_head.0.0.linear.weight: f32[8, 8], @medusa_head.0.0.linear.bias: f32[8])
  %5: f32[T, 8] = aten.sigmoid(%4)
  %6: f32[T, 8] = aten.mul.Tensor(%4, %5)
  %7: f32[T, 8] = aten.add.Tensor(%1, %6)
  %8: f32[T, 16] = icc.linear(%7, @head: f32[16, 8], None)
  %9: (f32[T, 3], i64[T, 3]) = icc.topk(%8, 3, True)
  %10: i64[T, 3] = getitem(%9, 1)
  %11: f32[T, 8] = icc.linear(%1, @medusa_head.1.0.linear.weight: f32[8, 8], @medusa_head.1.0.linear.bias: f32[8])
  %12: f32[T, 8] = aten.sigmoid(%11)
  %13: f32[T, 8] = aten.mul.Tensor(%11, %12)
  %14: f32[T, 8] = aten.add.Tensor(%1, %13)
  %15: f32[T, 16] = icc.linear(%14, @head: f32[16, 8], None)
  %16: (f32[T, 3], i64[T, 3]) = icc.topk(%15, 3, True)
  %17: i64[T, 3] = getitem(%16, 1)
  %18: i64[T, 6] = aten.cat([%10, %17], 1)
  %19: i64[T, 2, 3] = aten.view(%18, [-1, 2, 3])
  return %3, medusa.drafts=%19
""",
    )


def expected(heads: Sequence[Head], ranks: int) -> torch.Tensor:
    """The tokens [T, heads, ranks] of the heads, computed by hand."""
    x = torch.nn.functional.rms_norm(random("x", (16, 8))[IDS], (8,), random("w", (8,)), 1e-5)
    found = []
    for one in heads:
        y = x
        for weight, bias in one.blocks:
            y = y + silu(y @ weight.load().T + bias.load())
        y = y if one.projection is None else y @ one.projection.load().T
        lm_head = random("head", (16, 8)) if one.lm_head is None else one.lm_head.load()
        found.append((y @ lm_head.T).topk(ranks).indices)
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("kind", ["shared", "own", "projected"])
def test_numbers(kind: str) -> None:
    heads = [head(number, 2, kind == "own") for number in range(3)]
    for number, one in enumerate(heads if kind == "projected" else ()):
        one.projection = Constant(random(f"p{number}", (8, 8)))
    graph = apply(InsertMedusaHeads(tuple(heads), ranks=4), trace(model, **INPUTS)).graph
    found = interpret_outputs(graph, IDS)
    assert torch.equal(found["medusa.drafts"], expected(heads, 4))
    assert torch.equal(found["logits"], interpret(trace(model, **INPUTS), IDS))


def test_selected_rows_and_the_pipeline_keep_the_drafts() -> None:
    """After select-logit-rows, and through every later pass."""
    heads = (head(0, 2, True), head(1, 2, True))
    graph = trace(model, **INPUTS)
    run_passes(graph, [InsertMedusaHeads(heads, ranks=4)], PassContext())
    done = apply(SelectLogitRows(), graph)
    assert "%draft_rows: i64[D]" in done.text and "f32[D, 8] = icc.select_rows(%" in done.text
    graph = trace(lambda positions, **rest: model(**rest), positions="", **INPUTS)
    passes = [InsertMedusaHeads(heads, ranks=4), *pipelines.canonicalize(), *pipelines.attention(), *pipelines.fuse()]
    run_passes(graph, passes, PassContext())
    assert torch.equal(interpret_outputs(graph, IDS)["medusa.drafts"], expected(heads, 4))
    assert difference(interpret(trace(model, **INPUTS), IDS), interpret(graph, IDS)) < 1e-6


def test_heads_are_quantized_and_the_model_is_not_quantized_again() -> None:
    heads = (head(0, hidden=64, own=True),)
    inputs = {"x": "f32[T, 64]", "w": "f32[64]", "head": "f32[16, 64]"}
    graph = trace(model, **inputs)
    run_passes(graph, pipelines.speculate(heads, 0, "rtn4", "int8"), PassContext())
    quantized = {name for name, weight in graph.weights.items() if isinstance(weight, QuantizedWeight)}
    assert quantized == {"medusa_head.0.0.linear.weight", "medusa_head.0.1.weight"}
    plain = trace(model, **inputs)
    run_passes(plain, pipelines.speculate(heads, 0, "none", "int8"), PassContext())
    assert (
        interpret_outputs(plain, IDS)["medusa.drafts"][:, 0, 0]
        == interpret_outputs(graph, IDS)["medusa.drafts"][:, 0, 0]
    ).sum() > 5
    assert pipelines.speculate((), 0, "rtn4", "int8") == []


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (head(0, hidden=16), "medusa_head.0.0.linear.weight has hidden size 16, the model has 8"),
        (head(0, own=True, vocab=17), "medusa_head.0.1.weight has vocabulary 17, the model has 16"),
        (Head((), Constant(torch.zeros(16, 4))), "medusa_head.0.0.weight has hidden size 4, the model has 8"),
    ],
)
def test_heads_of_another_model_are_refused(wrong: Head, what: str) -> None:
    graph = trace(model, **INPUTS)
    before = print_graph(graph)
    with pytest.raises(HeadMismatch, match=what):
        run_passes(graph, [InsertMedusaHeads((wrong,))], PassContext())
    assert print_graph(graph) == before


def test_logits_of_two_layers_are_refused() -> None:
    def two(x: Value, head: Value, other: Value) -> Value:
        return icc.linear.default(x, head, None) + icc.linear.default(aten.exp.default(x), other, None)

    graph = trace(two, x="f32[T, 8]", head="f32[16, 8]", other="f32[16, 8]")
    with pytest.raises(PassError, match="come from 2 linear layers"):
        run_passes(graph, [InsertMedusaHeads((head(0),))], PassContext())
