"""Matrices of integers, as onnxruntime's quantizers write them, stay integers; products round no activations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from contributed import DOMAIN
from icc.compiler.frontend.load import load_graph
from icc.compiler.frontend.source.onnx.container import sorted_nodes
from icc.compiler.frontend.source.onnx.integers import integers, stored_integers
from icc.compiler.graph.interpret import interpret
from icc.compiler.weights.handles import Constant
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch import from_numpy

IDS = [5, 7, 9, 3, 20, 11, 40, 60]
K = 32
RANDOM = np.random.default_rng(3)


def codes(kind: type, *shape: int) -> np.ndarray:
    info = np.iinfo(kind)
    return RANDOM.integers(info.min, info.max + 1, shape).astype(kind)


def scales(*shape: int) -> np.ndarray:
    return RANDOM.uniform(0.001, 0.002, shape).astype(np.float32)


def quantized_product(name: str, rows: str, weight: str, scale: str, zero: str) -> list[NodeProto]:
    """The nodes that quantize_dynamic makes of MatMul(rows, weight)."""
    make = helper.make_node
    return [
        make("DynamicQuantizeLinear", [rows], [f"{name}.q", f"{name}.s", f"{name}.z"]),
        make("MatMulInteger", [f"{name}.q", weight, f"{name}.z", zero], [f"{name}.i"]),
        make("Cast", [f"{name}.i"], [f"{name}.f"], to=TensorProto.FLOAT),
        make("Mul", [f"{name}.s", scale], [f"{name}.ss"]),
        make("Mul", [f"{name}.f", f"{name}.ss"], [name]),
    ]


def test_every_form_keeps_its_codes(tmp_path: Path) -> None:
    """Tables, MatMulInteger, DynamicQuantizeMatMul, and DequantizeLinear per tensor, per channel and per block."""
    make, halves = helper.make_node, RANDOM.integers(-8, 8, (K, K))
    given = {
        "table": codes(np.uint8, 128, K), "table.s": scales(), "table.z": np.uint8(117),
        "a": codes(np.int8, K, K), "a.s": scales(K), "a.z": np.zeros(K, np.int8),
        "b": codes(np.uint8, K, K), "b.s": scales(), "b.z": np.uint8(130),
        "c": codes(np.int8, K, K), "c.s": scales(K), "c.z": codes(np.int8, K),
        "d.s": scales(2, K), "e": codes(np.int8, 24, K), "e.s": scales(24),
    }  # fmt: skip
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in given.items()]
    packed = helper.make_tensor("d", TensorProto.INT4, (K, K), halves.ravel())
    nodes = [
        make("Gather", ["table", "input_ids"], ["rows"]),
        make("DequantizeLinear", ["rows", "table.s", "table.z"], ["x"]),
        *quantized_product("xa", "x", "a", "a.s", "a.z"),
        make("DynamicQuantizeMatMul", ["xa", "b", "b.s", "b.z"], ["xb"], domain=DOMAIN),
        make("DequantizeLinear", ["c", "c.s", "c.z"], ["cf"], axis=1), make("MatMul", ["xb", "cf"], ["xc"]),
        make("DequantizeLinear", ["d", "d.s"], ["df"], axis=0, block_size=16), make("MatMul", ["xc", "df"], ["xd"]),
        make("DequantizeLinear", ["e", "e.s"], ["ef"], axis=0), make("Transpose", ["ef"], ["et"], perm=[1, 0]),
        make("MatMul", ["xd", "et"], ["logits"]),
    ]  # fmt: skip
    info = helper.make_tensor_value_info
    inputs = [info("input_ids", TensorProto.INT64, ["batch", "sequence"])]
    outputs = [info("logits", TensorProto.FLOAT, ["batch", "sequence", 24])]
    graph = helper.make_graph(nodes[::-1], "g", inputs, outputs, [*tensors, packed])  # some files have this order
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(graph, ir_version=10).SerializeToString())

    def value(name: str) -> np.ndarray:
        return given[name].astype(np.float64)

    x = (value("table")[IDS] - value("table.z")) * value("table.s")
    x = x @ (value("a") * value("a.s")) @ ((value("b") - value("b.z")) * value("b.s"))
    x = x @ ((value("c") - value("c.z")) * value("c.s")) @ (halves * value("d.s").repeat(16, 0))
    wanted = x @ (value("e") * value("e.s")[:, None]).T
    read = load_graph(path, 64)
    assert np.abs(interpret(read, IDS).numpy() - wanted).max() <= 1e-5 * np.abs(wanted).max()
    stored = sorted(w.storage.name for w in read.weights.values())
    assert stored == ["zq4_f32g16", *["zq8_f32g32"] * 5]


@pytest.mark.parametrize(
    ("shape", "scale", "axis", "block"),
    [((K, 24), (K,), 0, 0), ((40, 24), (), 0, 0), ((K, 24), (K // 8, 24), 0, 8), ((K, 24), (24, 1), 1, 0)],
    ids=["a scale per row of inputs", "an odd width", "small blocks", "scales of another form"],
)
def test_what_has_no_format_is_left_to_others(
    shape: tuple[int, ...], scale: tuple[int, ...], axis: int, block: int
) -> None:
    weight, own = (Constant(from_numpy(np.asarray(v))) for v in (codes(np.int8, *shape), scales(*scale)))
    assert integers(weight, own, None, True, axis, block) is None


def test_nodes_in_any_order() -> None:
    nodes = [helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"]) for i in range(50)]
    assert sorted_nodes(nodes[::-1]) == nodes
    assert sorted_nodes(nodes) == nodes
    assert len(sorted_nodes([helper.make_node("Add", ["a", "b"], ["a"])])) == 1  # a node that reads its output


def test_a_product_of_two_roundings_rounds_neither() -> None:
    """Optimum's quantizer writes such a product for queries times keys."""
    make = helper.make_node
    other = make("DynamicQuantizeLinear", ["k"], ["k.q", "k.s", "k.z"])
    found, weights = stored_integers([other, *quantized_product("qk", "q", "k.q", "k.s", "k.z")], {})
    assert [(n.op_type, list(n.input), list(n.output)) for n in found[-1:]] == [("MatMul", ["q", "k"], ["qk"])]
    assert not weights
