"""Changes of the structure of ONNX files."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
from changing import Change
from onnx import ModelProto, TensorProto, helper, numpy_helper

ODD = (0, 1, -1, 3, 7, 1 << 31, 1 << 62, -(1 << 63))
OPS = ("Loop", "Scan", "If", "NonZero", "CumSum", "TopK", "Einsum", "Bogus")


def rewire(m: ModelProto, rng: random.Random) -> None:
    node = rng.choice([n for n in m.graph.node if n.input])
    names = [name for n in m.graph.node for name in n.output] + [t.name for t in m.graph.initializer]
    node.input[rng.randrange(len(node.input))] = rng.choice([*names, "", "nothing"])


def lose_an_operand(m: ModelProto, rng: random.Random) -> None:
    del rng.choice([n for n in m.graph.node if n.input]).input[-1]


def lose_a_node(m: ModelProto, rng: random.Random) -> None:
    m.graph.node.remove(rng.choice(m.graph.node))


def another_op(m: ModelProto, rng: random.Random) -> None:
    rng.choice(m.graph.node).op_type = rng.choice([*OPS, *(n.op_type for n in m.graph.node)])


def another_attribute(m: ModelProto, rng: random.Random) -> None:
    node = rng.choice([n for n in m.graph.node if n.attribute])
    attribute = rng.choice(node.attribute)
    if attribute.ints:
        attribute.ints[0] = rng.choice(ODD)
    elif attribute.type == attribute.INT:
        attribute.i = rng.choice(ODD)
    else:
        node.attribute.remove(attribute)


def another_size(m: ModelProto, rng: random.Random) -> None:
    tensor = rng.choice([t for t in m.graph.initializer if t.dims])
    tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(ODD)


def another_type(m: ModelProto, rng: random.Random) -> None:
    rng.choice(m.graph.initializer).data_type = rng.randrange(25)


def another_input(m: ModelProto, rng: random.Random) -> None:
    kind = rng.choice([*m.graph.input, *m.graph.output]).type.tensor_type
    kind.elem_type = rng.randrange(17)
    if kind.shape.dim:
        kind.shape.dim[-1].dim_value = rng.choice(ODD)


CHANGES: tuple[Callable[[ModelProto, random.Random], None], ...] = (
    rewire, lose_an_operand, lose_a_node, another_op, another_attribute, another_size, another_type, another_input,
)  # fmt: skip


def as_change(change: Callable[[ModelProto, random.Random], None]) -> Change:
    """Make a change of a model a change of a file's bytes."""

    def changed(data: bytes, chance: random.Random, _: Sequence[bytes]) -> bytes:
        try:
            model = ModelProto.FromString(data)
            change(model, chance)
            return model.SerializeToString()
        except Exception:  # protobuf refuses the file, or it has nothing to change
            return data

    return changed


def small_model() -> ModelProto:
    """A bigram model of 2 KB: an embedding, a norm written out, a product, and a known shape."""
    random = np.random.default_rng(0)
    values = {
        "table": random.standard_normal((12, 8)), "weight": random.standard_normal((8, 12)), "eps": np.array(1e-5),
        "scale": np.ones(8), "axis": np.array([-1], np.int64),
    }  # fmt: skip
    constants = [
        numpy_helper.from_array(v if v.dtype == np.int64 else v.astype(np.float32), name) for name, v in values.items()
    ]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["x"], axis=0),
        helper.make_node("Mul", ["x", "x"], ["square"]),
        helper.make_node("ReduceMean", ["square", "axis"], ["mean"], keepdims=1),
        helper.make_node("Add", ["mean", "eps"], ["shifted"]),
        helper.make_node("Sqrt", ["shifted"], ["root"]),
        helper.make_node("Div", ["x", "root"], ["normal"]),
        helper.make_node("Mul", ["normal", "scale"], ["scaled"]),
        helper.make_node("MatMul", ["scaled", "weight"], ["logits"]),
    ]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "tokens", 12])
    graph = helper.make_graph(nodes, "bigram", [ids], [logits], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
