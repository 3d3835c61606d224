"""Converts a graph to an ONNX model: its inputs, its nodes in order, its outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from onnx import GraphProto, ValueInfoProto, helper
from torch import fx

from ..graph.graph import HIDDEN, Graph
from ..graph.tensor_types import DRAFT_ROWS, LOGIT_ROWS, TOKENS, type_of
from .attention import Sequences
from .builder import MICROSOFT, TYPES, Builder, StoredInitializers
from .ops import write_call
from .weights import Weights
from .writer import Writer

OPSET = 23  # the first opset with RMSNormalization
IR_VERSION = 11
# Names of inputs and outputs in transformers and optimum.
_NAMES = {"token_ids": "input_ids", "positions": "position_ids", HIDDEN: "last_hidden_state"}
_ROWS = {LOGIT_ROWS: "rows", DRAFT_ROWS: "draft_rows"}


@dataclass(frozen=True)
class Exported:
    """The graph without the values of its weights, and the weights, whose values are read when they are written.

    decoded: for each format that ONNX ops cannot decode, the number of weights that are stored decoded.
    """

    graph: GraphProto
    stored: tuple[StoredInitializers, ...]
    domains: tuple[str, ...]
    decoded: dict[str, int]


def export_graph(graph: Graph) -> Exported:
    """The graph in ONNX: input_ids and position_ids int64 [batch, sequence], logits float32 [batch, sequence, vocab].

    If the graph takes logit_rows int64 [rows], indices of tokens of the whole batch, logits are [rows, vocab]. If the
    graph scores texts, logits are float32 [batch, labels]. Inputs that the graph declares, such as token_type_ids, are
    int64 or float32 [batch, sequence, ...]. Raises ExportError naming an op that cannot be written.
    """
    b, decoded = Builder(), {}
    inputs: list[ValueInfoProto] = []
    values: dict[fx.Node, str] = {}
    sequences: Sequences | None = None
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        name = _NAMES.get(str(node.target), str(node.target))
        kind = type_of(node)
        axes = ["batch", "sequence", *kind.shape] if kind.rows == TOKENS else [_ROWS.get(kind.rows or "", "rows")]
        inputs.append(helper.make_tensor_value_info(name, TYPES[kind.dtype], axes))
        values[node] = b.unique(name)
        if kind.rows == TOKENS:
            sequences = sequences or _sequences(b, name)
            with b.at("inputs"):
                values[node] = b.reshape(name, -1, *kind.shape)
    assert sequences is not None, "a graph takes token ids or positions"
    writer = Writer(graph, b, Weights(b, decoded), sequences, dict(values))
    for node in graph.nodes:
        if node.op == "call_function":
            write_call(writer, node)
    outputs = [_output(writer, name, node) for name, node in graph.outputs.items()]
    made = helper.make_graph(b.nodes, graph.info.architecture or "icc", inputs, outputs)
    return Exported(made, tuple(b.stored), tuple(sorted(b.domains)), decoded)


def _sequences(b: Builder, name: str) -> Sequences:
    with b.at("sequences"):
        shape = b.add("Shape", name)
        return Sequences(shape, b.add("Gather", shape, b.constant(1, torch.int64), axis=0))


def _output(w: Writer, name: str, node: fx.Node) -> ValueInfoProto:
    """An output; rows of tokens get the batch and sequence axes of the input back."""
    b, kind, value = w.b, type_of(node), w.value(node)
    name = _NAMES.get(name, name)
    width = kind.shape[-1]
    axes = [_ROWS.get(kind.rows or "", "rows"), width]
    with b.at("outputs"):
        if kind.rows == TOKENS:
            axes = ["batch", "sequence", width]
            value = b.add("Reshape", value, b.add("Concat", w.sequences.shape, b.ints(width), axis=0))
            if w.graph.picked:  # one row per text, not per token
                name, axes = "logits", ["batch", width]
                value = b.add("Gather", value, b.constant(-1 if w.graph.picked == "last" else 0, torch.int64), axis=1)
        last = b.add("Identity", value)
    b.nodes[-1].output[0] = name
    assert last != name
    return helper.make_tensor_value_info(name, TYPES[kind.dtype], axes)


def opset_imports(exported: Exported) -> list[tuple[str, int]]:
    """Domains of the ops and their versions."""
    return [(domain, 1 if domain == MICROSOFT else OPSET) for domain in exported.domains]
