"""Whole graphs lowered: shape ops through the library, equal kernels stored once, weights shared, logits in place."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from graph_tracing import IDS, Value, aten, attention, cat, difference, icc, random, trace
from icc.compiler.errors import UnsupportedModel
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.ops import AttentionMask, AttentionSpec
from icc.compiler.program.lower import Lowered
from icc.compiler.program.program import decode_program
from icc.compiler.weights.formats.affine import GroupAffine
from icc.compiler.weights.handles import Constant, RoundedWeight
from icc.runtime.format.operands import OutputOperand
from run_lowered import lower_graph, optimize, run_lowered

view, permute, expand = aten.view.default, aten.permute.default, aten.expand.default
convert = torch.ops.prims.convert_element_type.default
linear = icc.linear.default


def flat(x: Value) -> Value:
    return x.view(-1, int(torch.Size(x.node.meta["type"].shape).numel()))


def shape_ops(x: Value, h: Value, w: Value, m: Value, bias: Value) -> list[Value]:
    """Uses of x [T, 2, 3, 4] and h [T, 8] that need strides, copies, or both."""
    turned = permute(x, [0, 3, 1, 2])
    wide = expand(h.view(-1, 1, 8), [-1, 3, 8])
    return [
        turned, permute(turned.view(-1, 4, 6), [0, 2, 1]).view(-1, 4, 6),
        x.slice(3, 1, 4, 2), x.slice(2, 2, 3).view(-1, 2, 4), permute(x.slice(1, 1, 2), [0, 2, 3, 1]).view(-1, 12),
        wide, permute(wide, [0, 2, 1]).view(-1, 24) * 2.0,
        cat([x.slice(3, 2, 4), -x.slice(3, 0, 2)], 3), cat([turned.view(-1, 24), h, h.slice(1, 7, 8)], 1),
        aten.repeat.default(h, [1, 3]), aten.repeat.default(x, [1, 2, 1, 2]), aten.repeat.default(turned, [1, 1, 2, 1]),
        x * w, turned * expand(h.slice(1, 0, 4).view(-1, 4, 1, 1), [-1, 4, 2, 3]),
        x + h.slice(1, 3, 4).view(-1, 1, 1, 1),
        linear(h.slice(1, 0, 4), m, bias), linear(x, m, bias), linear(turned.view(-1, 6, 4), m, None),
        linear(turned.slice(3, 0, 2).view(-1, 4, 4) * 1.5, m, bias),
        linear(permute(x, [0, 2, 1, 3]), m, bias),
        icc.rms_norm.default(permute(x, [0, 1, 3, 2]), None, 1e-5), icc.softmax.default(turned),
        icc.reduce.default(turned, "sum", 2), icc.bmm.default(x, permute(x, [0, 1, 3, 2])),
        icc.bmm.default(x, expand(h.view(-1, 1, 4, 2), [-1, 2, 4, 2])), icc.topk.default(turned, 2, False)[0],
        icc.gather.default(h, convert(aten.abs.default(h.slice(1, 0, 8, 3)) * 2.0, torch.int64)),
    ]  # fmt: skip


@pytest.mark.parametrize("rows", [None, [4, 0, 4]])
def test_shape_ops_through_the_library(rows: list[int] | None, tmp_path: Path) -> None:
    inputs = {"x": "f32[T, 2, 3, 4]", "h": "f32[T, 8]", "w": "f32[2, 1, 4]", "m": "bf16[5, 4]", "bias": "f32[5]"}
    graph = optimize(trace(lambda **v: cat([flat(u) for u in shape_ops(**v)], 1), **inputs))
    expected = interpret(graph, IDS, rows)
    found = torch.from_numpy(run_lowered(lower_graph(graph), tmp_path, IDS, rows))
    assert difference(expected, found) < 1e-5


def model(tiny: ModuleType, path: Path, family: str, **changes: Any) -> Lowered:
    config = tiny.tiny_configs()[family]
    for name, value in changes.items():
        setattr(config, name, value)
    tiny.save_tiny(config, path)
    return lower_graph(optimize(load_graph(path)))


def test_kernels_do_not_grow_with_depth(tiny: ModuleType, tmp_path: Path) -> None:
    shallow, deep = (model(tiny, tmp_path / str(n), "llama", num_hidden_layers=n) for n in (2, 6))
    assert deep.program.kernels.keys() == shallow.program.kernels.keys()
    assert len(deep.program.steps) > 2.5 * len(shallow.program.steps)
    assert deep.program.arena_bytes_per_token == shallow.program.arena_bytes_per_token
    assert [len(group.layers) for group in deep.program.kv.groups] == [6]


def test_tied_embeddings_are_packed_once(tiny: ModuleType, tmp_path: Path) -> None:
    lowered = model(tiny, tmp_path, "gemma2")
    tables = [n for n, w in lowered.program.weights.items() if w.shape == [120, 64]]
    assert len(tables) == 1 and lowered.program.weights[tables[0]].format.startswith("tile_")
    readers = {s.op for s in lowered.program.steps if any(o.name == tables[0] for o in s.operands.values())}
    assert readers == {"embedding", "linear"}


def test_softcapped_logits_are_written_in_place(tiny: ModuleType, tmp_path: Path) -> None:
    """The head and the soft cap both write the output: no buffer has its size."""
    lowered = model(tiny, tmp_path, "gemma2")
    last_two = lowered.program.steps[-2:]
    assert [s.op for s in last_two] == ["linear", "pointwise"]
    assert all(isinstance(s.operands["y"], OutputOperand) for s in last_two)
    assert not any(b.shape == [120] for b in lowered.program.buffers)


def test_a_program_with_an_infinity_is_read_as_it_was_written() -> None:
    """JSON has no infinities, but a router that masks its best expert writes -inf."""

    def mask(x: Value) -> Value:
        best = icc.topk.default(x, 1, False)[1]
        return icc.scatter.default(x, best, None, float("-inf"), False)

    program = lower_graph(optimize(trace(mask, x="f32[T, 8]"))).program
    assert "scatter" in program.kernels.values()
    assert decode_program(msgspec.json.encode(program), "program.json") == program


def test_linears_share_the_quantized_activation() -> None:
    """One quantize_rows for two products of one input with weights that could not be merged."""
    rounded = {
        n: RoundedWeight(Constant(random(n, (16, 32))), GroupAffine(32, bits)) for n, bits in (("a", 4), ("b", 8))
    }

    def fn(x: Value, a: Value, b: Value) -> Value:
        return linear(x, a, None) * linear(x, b, None)

    lowered = lower_graph(optimize(trace(fn, x="f32[T, 32]", **rounded)))
    ops = [s.op for s in lowered.program.steps]
    assert ops.count("quantize_rows") == 1 and ops.count("linear_q") == 2


def test_kv_layers_have_no_gaps() -> None:
    """A pass may remove an attention layer whose value is unused."""

    def fn(q: Value, positions: Value) -> Value:
        first = attention(q, q, q, AttentionSpec(1, 0.5))
        return attention(q, first, first, AttentionSpec(3, 0.5, AttentionMask(4)))

    program = lower_graph(optimize(trace(fn, q="f32[T, 2, 8]", positions=""))).program
    assert [s.layer for s in program.steps if s.layer >= 0] == [0, 0, 1, 1]
    groups = [(group.keeps, group.size, list(group.layers)) for group in program.kv.groups]
    assert groups == [("all", 0, [0]), ("window", 4, [1])]


def test_refuses_an_op_without_a_kernel_by_name() -> None:
    def fn(q: Value) -> Value:
        out = attention(q, q, q, AttentionSpec(0, 0.5))
        out.node.meta["module"] = "model.layers.0.self_attn"
        return out

    with pytest.raises(UnsupportedModel, match=r"icc.attention in module 'model.layers.0.self_attn' has no kernel"):
        lower_graph(trace(fn, q="f32[T, 2, 8]"))
