"""Imported ONNX ops, node by node, against onnxruntime's values for the same node. Attentions, which the importer keeps
whole for the frontend, are traced as a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from contributed import DOMAIN
from icc.compiler.errors import TensorError
from icc.compiler.frontend.load import load_graph
from icc.compiler.frontend.source.onnx.known import Known
from icc.compiler.frontend.source.onnx.module import HANDLERS
from icc.compiler.frontend.source.onnx.table import OnnxCall
from icc.compiler.graph.graph import Graph, attention_spec
from icc.compiler.graph.interpret import interpret
from onnx import TensorProto, helper, numpy_helper
from onnx_running import feeds, session

RANDOM = np.random.default_rng(1)
IDS = [5, 7, 9, 3, 20, 11, 40, 60, 1, 2, 33, 17, 90]
T, HIDDEN, HEADS, DIM = len(IDS), 64, 4, 16


def floats(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


X, SMALL = floats(2, 3, 8), floats(2, 3, 8) * 0.4
ROW, MATRIX = floats(8), floats(8, 6)
PLACES = RANDOM.integers(0, 3, (2, 3, 8))


def one(
    op: str, *inputs: Any, outputs: int = 1, domain: str = "", known: tuple[int, ...] = (), **attributes: Any
) -> Any:
    """A case. inputs: the operands; None: an absent one. known: the operands that must be known while tracing."""
    name = f"{op}-{'-'.join(map(str, attributes))}" if attributes else op
    return pytest.param(op, inputs, outputs, domain, known, attributes, id=name)


def contrib(op: str, *inputs: Any, **options: Any) -> Any:
    return one(op, *inputs, domain=DOMAIN, **options)


NODES = [
    *(one(op, X) for op in ("Neg", "Abs", "Sign", "Exp", "Sin", "Cos", "Tan", "Tanh", "Erf", "Sigmoid", "Relu")),
    *(one(op, X) for op in ("Softplus", "Floor", "Ceil", "Round", "Mish", "HardSwish", "Elu", "LeakyRelu")),
    *(one(op, np.abs(X) + 0.1) for op in ("Sqrt", "Log", "Reciprocal")),
    *(one(op, X, SMALL) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Less", "GreaterOrEqual", "Equal")),
    one("Sum", X, SMALL, ROW), one("Pow", np.abs(X), SMALL), one("Div", PLACES - 1, PLACES + 2), one("Not", X > 0),
    one("And", X > 0, SMALL > 0), one("Or", X > 0, SMALL > 0), one("Where", X > 0, X, SMALL),
    one("Celu", X, alpha=0.7), one("HardSigmoid", X, alpha=0.3), one("Mod", PLACES, PLACES + 1),
    one("Clip", X, np.float32(-0.5), np.float32(0.8), known=(1, 2)),
    one("Gelu", X), one("Gelu", X, approximate="tanh"), contrib("Gelu", X), contrib("QuickGelu", X, alpha=1.5),
    contrib("FastGelu", X), contrib("FastGelu", X, ROW), contrib("BiasGelu", X, ROW),
    one("MatMul", X, MATRIX), contrib("FusedMatMul", X, SMALL, transB=1, alpha=0.25),
    one("Gemm", X[0], MATRIX, floats(6), alpha=0.5, beta=2.0), one("Gemm", X[0], MATRIX.T.copy(), transB=1),
    *(one(op, X, np.array([-1]), known=(1,), keepdims=0) for op in ("ReduceMean", "ReduceSum", "ReduceMax")),
    *(one(op, X, np.array([1, 2]), known=(1,)) for op in ("ReduceMin", "ReduceProd", "ReduceL2")),
    one("GatherND", X, np.array([[0, 1], [1, 2], [0, 0]]), known=(1,)),
    one("GatherND", X, np.array([[0, 0], [0, 1], [0, 2], [1, 0]]), known=(1,)),
    one("ScatterND", X, np.array([[[0, 1]], [[1, 2]]]), floats(2, 1, 8)), one("NonZero", PLACES[0] > 1, known=(0,)),
    one("ArgMax", X, axis=-1, keepdims=0), one("TopK", X, np.array([3]), known=(1,), outputs=2, axis=-1),
    one("CumSum", X, np.array(2), known=(1,)), one("Softmax", X), one("LogSoftmax", X),
    one("LayerNormalization", X, ROW, ROW), one("LayerNormalization", X, ROW, epsilon=0.01),
    one("RMSNormalization", X, ROW, epsilon=0.01),
    contrib("SkipLayerNormalization", X, SMALL, ROW, ROW[::-1].copy(), ROW, epsilon=0.01),
    contrib("SkipLayerNormalization", X, SMALL, ROW),
    contrib("SkipSimplifiedLayerNormalization", X, SMALL, ROW, ROW, epsilon=0.01),
    contrib("EmbedLayerNormalization", PLACES[0].astype(np.int32), PLACES[1].astype(np.int32), floats(9, 8),
            floats(9, 8), floats(3, 8), ROW, ROW, None, outputs=2, epsilon=0.01),
    one("Reshape", X, np.array([0, -1]), known=(1,)), one("Flatten", X, axis=2),
    one("Unsqueeze", X, np.array([0, -1]), known=(1,)), one("Squeeze", X[:1], np.array([0]), known=(1,)),
    one("Transpose", X, perm=[2, 0, 1]), one("Concat", X, SMALL, axis=-1),
    one("Split", X, np.array([2, 5, 1]), known=(1,), outputs=3, axis=-1),
    one("Split", X, outputs=2, axis=2, num_outputs=2),
    one("Slice", X, np.array([1, 0]), np.array([7, 2**62]), np.array([2, 1]), np.array([2, 1]), known=(1, 2, 3, 4)),
    one("Slice", X, np.array([-1]), np.array([-(2**62)]), np.array([2]), np.array([-1]), known=(1, 2, 3, 4)),
    one("Gather", X, np.array([2, 0]), known=(1,), axis=1), one("Gather", X, np.array(-1), known=(1,), axis=2),
    one("Gather", MATRIX, PLACES), one("GatherElements", X, PLACES, axis=2),
    one("GatherND", X, np.array([[0, 2], [1, 1]])),
    one("ScatterElements", X, PLACES[..., :2], SMALL[..., :2], axis=2, reduction="add"),
    one("Expand", X[:, :1], np.array([2, 3, 1]), known=(1,)), one("Tile", X, np.array([1, 2, 1]), known=(1,)),
    one("Range", np.array(2), np.array(90), np.array(3), known=(0, 1, 2)),
    one("ConstantOfShape", np.array([2, 70]), known=(0,)), one("Shape", X), one("Size", X),
    one("Trilu", X, np.array(1), known=(1,)), one("Trilu", X, upper=0),
    one("Cast", X * 3, to=TensorProto.INT64), one("Identity", X),
    *(one("RotaryEmbedding", floats(1, 4, 5, 8), floats(9, 4), floats(9, 4), np.arange(5)[None], interleaved=i)
      for i in (0, 1)),
    one("RotaryEmbedding", floats(1, 5, 32), floats(1, 5, 3), floats(1, 5, 3), num_heads=4, rotary_embedding_dim=6),
    *(contrib("RotaryEmbedding", floats(1, 5, 32), np.arange(5)[None], floats(9, 4), floats(9, 4), num_heads=4, **more)
      for more in ({}, {"interleaved": 1})),
    contrib("RotaryEmbedding", floats(1, 4, 5, 8), np.array([0]), floats(9, 4), floats(9, 4), known=(1,)),
]  # fmt: skip


@pytest.mark.parametrize(("op", "inputs", "outputs", "domain", "known", "attributes"), NODES)
def test_a_node(op: str, inputs: Any, outputs: int, domain: str, known: Any, attributes: dict[str, Any]) -> None:
    names = [f"i{n}" if value is not None else "" for n, value in enumerate(inputs)]
    given = {name: np.asarray(value) for name, value in zip(names, inputs, strict=True) if name}
    node = helper.make_node(op, names, [f"o{n}" for n in range(outputs)], domain=domain, **attributes)
    wanted = computed([node], given, list(node.output))
    operands = [
        None if v is None else as_known(np.asarray(v)) if n in known else torch.from_numpy(np.array(v))
        for n, v in enumerate(inputs)
    ]
    name = f"{domain}.{op}" if domain else op
    call = OnnxCall(
        node,
        {a.name: helper.get_attribute_value(a) for a in node.attribute},
        operands,
        torch.device("cpu"),
        [False] * len(names),
        {},
    )
    found = HANDLERS[name](call)
    for value, reference in zip(found if isinstance(found, list) else [found], wanted, strict=False):
        value = value.as_tensor(torch.device("cpu")) if isinstance(value, Known) else value
        assert tuple(value.shape) == reference.shape
        np.testing.assert_allclose(value.numpy(), reference, rtol=1e-4, atol=2e-6)


def as_known(value: np.ndarray) -> Known:
    flat = Known.of(value.reshape(-1).tolist(), torch.from_numpy(np.array(value)).dtype)
    return Known(flat.array.reshape(value.shape), flat.dtype)


def computed(nodes: list[Any], given: dict[str, np.ndarray], outputs: list[str]) -> list[np.ndarray]:
    """The outputs that onnxruntime computes."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in given.items()
    ]
    graph = helper.make_graph(nodes, "g", inputs, [onnx.ValueInfoProto(name=name) for name in outputs])
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(outputs, given)


class Branches:
    """A model that concatenates the results of several nodes over the same embedding."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.results: list[str] = []
        self.x = self.node("Gather", self.weight(128, HIDDEN), "input_ids")

    def constant(self, value: np.ndarray, kind: int = 0) -> str:
        name = f"c{len(self.constants)}"
        if kind:  # 4-bit integers
            self.constants.append(helper.make_tensor(name, kind, value.shape, value.flatten().tolist()))
        else:
            self.constants.append(numpy_helper.from_array(value, name))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(floats(*shape) * np.float32(0.3))

    def node(self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> str:
        names = [f"{op}{len(self.nodes)}_{n}" for n in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, domain=domain, **attributes))
        return names[0]

    def projected(self, width: int = HIDDEN) -> str:
        return self.node("MatMul", self.x, self.weight(HIDDEN, width))

    def result(self, op: str, *inputs: str, **options: Any) -> None:
        self.results.append(self.node(op, *inputs, **options))

    def write(self, path: Path) -> None:
        self.nodes.append(helper.make_node("Concat", self.results, ["last_hidden_state"], axis=-1))
        info = helper.make_tensor_value_info
        inputs = [info(name, TensorProto.INT64, ["batch", "sequence"]) for name in ("input_ids", "attention_mask")]
        outputs = [info("last_hidden_state", TensorProto.FLOAT, ["batch", "sequence", "width"])]
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, self.constants)
        imports = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
        onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), path)


def check(path: Path) -> Graph:
    """Check the model of a file against onnxruntime, part by part; returns the graph."""
    graph, found = load_graph(path, 64, task="embed"), session(path, exact=True)
    [wanted] = found.run(None, {name: value for name, value in feeds(found, IDS).items()})
    values = interpret(graph, IDS).numpy()
    assert values.shape == wanted[0].shape
    for part in range(0, values.shape[1], 8):
        columns = slice(part, part + 8)
        np.testing.assert_allclose(values[:, columns], wanted[0][:, columns], rtol=1e-4, atol=1e-5, err_msg=str(part))
    return graph


def test_packed_weights_a_branch_and_norms(tmp_path: Path) -> None:
    b = Branches()
    codes = lambda *shape: RANDOM.integers(-120, 120, shape).astype(np.int8)  # noqa: E731
    scales = lambda *shape: b.constant((RANDOM.random(shape) * 0.02).astype(np.float32))  # noqa: E731
    zeros = b.constant(codes(24))
    per_axis = b.node("DequantizeLinear", b.constant(codes(HIDDEN, 24)), scales(24), zeros, axis=1)
    b.result("MatMul", b.x, per_axis)
    whole = b.node("DequantizeLinear", b.constant(codes(HIDDEN, 8)), b.constant(np.float32(0.01)))
    b.result("MatMul", b.x, whole)
    halves = b.constant(RANDOM.integers(-8, 8, (HIDDEN, 16)), TensorProto.INT4)
    b.result("MatMul", b.x, b.node("DequantizeLinear", halves, scales(4, 16), axis=0, block_size=16))
    packed = b.constant(RANDOM.integers(0, 256, (128, 32)).astype(np.uint8))
    more = b.constant(RANDOM.integers(0, 256, (128, 2)).astype(np.uint8))
    table = {"domain": DOMAIN, "block_size": 16, "gather_axis": 0, "quantize_axis": 1}
    b.result("GatherBlockQuantized", packed, "input_ids", scales(128, 4), more, bits=4, **table)
    signed = b.constant(RANDOM.integers(-8, 8, (128, 32)), TensorProto.INT4)
    b.result("GatherBlockQuantized", signed, "input_ids", scales(128, 2), **table)
    bytes_ = b.constant(RANDOM.integers(0, 256, (128, 32)).astype(np.uint8))
    b.result("GatherBlockQuantized", bytes_, "input_ids", scales(128, 2), bits=8, **table)
    yes = b.constant(np.array(True))
    info = helper.make_tensor_value_info("t", TensorProto.FLOAT, None)
    taken = helper.make_graph([helper.make_node("Neg", [b.x], ["t"])], "then", [], [info])
    other = helper.make_graph([helper.make_node("Abs", [b.x], ["t"])], "else", [], [info])
    b.result("If", yes, then_branch=taken, else_branch=other)
    b.write(tmp_path / "m.onnx")
    graph = check(tmp_path / "m.onnx")
    assert {"zq4_f32g16", "zq8_f32g16"} <= {weight.storage.name for weight in graph.weights.values()}


def test_attentions_that_are_one_node(tmp_path: Path) -> None:
    b = Branches()
    contributed = {"num_heads": HEADS, "domain": DOMAIN}
    bias, mask = b.weight(3 * HIDDEN), b.node("Cast", "attention_mask", to=TensorProto.INT32)
    b.result("MultiHeadAttention", b.projected(), b.projected(), b.projected(), bias, **contributed)
    b.result("MultiHeadAttention", b.projected(), b.projected(), b.projected(), "", mask, scale=0.2, **contributed)
    b.result("Attention", b.x, b.weight(HIDDEN, 3 * HIDDEN), bias, mask, **contributed)
    sizes = [HIDDEN, HIDDEN, 32]
    b.result("Attention", b.x, b.weight(HIDDEN, 160), b.weight(160), qkv_hidden_sizes=sizes, **contributed)
    plain = {"q_num_heads": HEADS, "kv_num_heads": 2}
    b.result("Attention", b.projected(), b.projected(32), b.projected(32), **plain)
    b.write(tmp_path / "m.onnx")
    graph = check(tmp_path / "m.onnx")
    assert len(list(graph.attention_nodes)) == 5 and graph.looks_ahead


def test_causal_attentions_that_are_one_node(tmp_path: Path) -> None:
    b = Branches()
    contributed = {"num_heads": HEADS, "domain": DOMAIN, "unidirectional": 1}
    b.result("MultiHeadAttention", b.projected(), b.projected(), b.projected(), **contributed)
    b.result("Attention", b.x, b.weight(HIDDEN, 3 * HIDDEN), b.weight(3 * HIDDEN), **contributed)
    plain = {"q_num_heads": HEADS, "kv_num_heads": 2, "is_causal": 1}
    b.result("Attention", b.projected(), b.projected(32), b.projected(32), **plain)
    b.result("Attention", b.projected(), b.projected(32), b.projected(32), softcap=5.0, scale=0.3, **plain)
    shared = {"num_heads": HEADS, "kv_num_heads": 2, "domain": DOMAIN}
    ones = b.node("ReduceSum", "attention_mask", b.constant(np.array([1])), keepdims=0)
    last = b.node("Cast", b.node("Sub", ones, b.constant(np.array([1]))), to=TensorProto.INT32)
    total = b.node(
        "Cast", b.node("Gather", b.node("Shape", "attention_mask"), b.constant(np.array(1))), to=TensorProto.INT32
    )
    angles = np.outer(np.arange(64), 1 / 100 ** (np.arange(8) / 8)).astype(np.float32)
    tables = [b.constant(np.cos(angles)), b.constant(np.sin(angles))]
    qkv = b.projected(HIDDEN + 64)
    for more in ({"do_rotary": 1}, {"do_rotary": 1, "rotary_interleaved": 1, "local_window_size": 4}, {"softcap": 3.0}):
        given = tables if "do_rotary" in more else []
        b.result("GroupQueryAttention", qkv, "", "", "", "", last, total, *given, **shared, **more)
    b.write(tmp_path / "m.onnx")
    graph = check(tmp_path / "m.onnx")
    assert not graph.looks_ahead and [attention_spec(node).mask.window for node in graph.attention_nodes] == [
        0,
        0,
        0,
        0,
        0,
        4,
        0,
    ]


def test_a_table_that_is_read_with_other_scales_is_refused(tmp_path: Path) -> None:
    b = Branches()
    codes = b.constant(RANDOM.integers(0, 256, (128, 4, 8)).astype(np.uint8))
    first, second = (b.constant(floats(128, 4)) for _ in range(2))
    table = b.node("Reshape", codes, b.constant(np.array([128, -1])))
    options = {"domain": DOMAIN, "block_size": 16}
    b.result("GatherBlockQuantized", table, "input_ids", first, gather_axis=0, quantize_axis=1, bits=4, **options)
    b.result("MatMulNBits", b.x, codes, second, K=64, N=128, bits=4, **options)
    b.write(tmp_path / "m.onnx")
    with pytest.raises(TensorError, match="other scales"):
        load_graph(tmp_path / "m.onnx", 64, task="embed")
