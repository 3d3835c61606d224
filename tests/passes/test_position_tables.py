"""position-tables."""

from __future__ import annotations

import pytest
import torch
from graph_tracing import Value, apply, aten, cat, icc, trace
from icc.compiler.errors import SequenceLengthError
from icc.passes.base import PassContext
from icc.passes.canonicalize.position_tables import PositionTables

convert = torch.ops.prims.convert_element_type.default


def rotary(positions: Value, x: Value, freqs: Value) -> Value:
    angle = convert(positions.view(-1, 1), torch.float32) * freqs
    angles = cat([angle, angle], 1)
    return x * aten.cos.default(angles) + x * aten.sin.default(angles)


def test_learned_positions_with_an_offset() -> None:
    """OPT: two rows of the table come before position 0."""

    def fn(positions: Value, x: Value, table: Value) -> Value:
        return x + icc.embedding.default(positions + 2, table)

    done = apply(PositionTables(), trace(fn, positions="", x="f32[T, 8]", table="f32[30, 8]"))
    assert done.graph.weights["position_table"].shape == (24, 8)


def test_moves_stay_in_the_graph() -> None:
    """The table is built before views, so that one table serves several readers."""

    def fn(positions: Value, x: Value) -> Value:
        row = aten.cos.default(convert(positions, torch.float32).view(-1, 1))
        return x * row + x * aten.expand.default(row, [-1, 8])

    assert apply(PositionTables(), trace(fn, positions="", x="f32[T, 8]")).counts == {"tables": 1}


def test_views_of_permuted_tables() -> None:
    """Torch's own view refuses these strides."""

    def fn(positions: Value, x: Value, freqs: Value) -> Value:
        angle = convert(positions.view(-1, 1, 1), torch.float32) * freqs
        return x * aten.cos.default(aten.permute.default(angle, [0, 2, 1]).view(-1, 8))

    assert apply(PositionTables(), trace(fn, positions="", x="f32[T, 8]", freqs="f32[2, 4]")).counts == {"tables": 1}


def test_a_table_already() -> None:
    def fn(positions: Value, x: Value, table: Value) -> Value:
        return x + icc.embedding.default(positions, table).view(-1, 8)

    assert apply(PositionTables(), trace(fn, positions="", x="f32[T, 8]", table="f32[30, 2, 4]")).counts == {}


def test_what_tokens_determine_stays() -> None:
    def fn(positions: Value, x: Value) -> Value:
        return x * convert(positions.view(-1, 1), torch.float32)

    done = apply(PositionTables(), trace(fn, positions="", x="f32[T, 8]"))
    assert done.ops.count("aten::mul.Tensor") == 1 and done.counts == {"tables": 1}


def test_no_positions() -> None:
    assert apply(PositionTables(), trace(lambda x: x * 2.0, x="f32[T, 8]")).counts == {}


def test_refuses_a_length_that_the_embedding_does_not_have() -> None:
    def fn(positions: Value, x: Value, table: Value) -> Value:
        return x + icc.embedding.default(positions + 2, table)

    graph = trace(fn, max_seq_len=29, positions="", x="f32[T, 8]", table="f32[30, 8]")
    with pytest.raises(SequenceLengthError, match="--max-seq-len 29 is above the positions"):
        PositionTables().run(graph, PassContext())
