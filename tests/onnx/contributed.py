"""A small decoder like those of onnxruntime's model builder: GroupQueryAttention, fused norms, MatMulNBits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCAB, HIDDEN, HEADS, SHARED, DIM, INNER, BLOCK = 120, 64, 4, 2, 16, 64, 16
DOMAIN = "com.microsoft"


def node_path(module: str) -> str:
    """The node name of a module: /model/layers.0/mlp for model.layers.0.mlp."""
    return "/" + re.sub(r"\.(?!\d)", "/", module)


class _Builder:
    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, name: str, value: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def weight(self, name: str, *shape: int) -> str:
        return self.constant(name, (self.random.standard_normal(shape) * 0.3).astype(np.float32))

    def add(self, op: str, name: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        results = [f"{name}/output_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, results, name=name, domain=domain, **attributes))
        return results[0] if outputs == 1 else results

    def linear(self, x: str, path: str, k: int, n: int, bits: int = 0) -> str:
        name = node_path(path)
        if not bits:
            return self.add("MatMul", f"{name}/MatMul", x, self.weight(f"{path}.MatMul.weight", k, n))
        blocks = k // BLOCK
        codes = self.random.integers(0, 256, (n, blocks, BLOCK * bits // 8), dtype=np.uint8)
        given = [self.constant(f"{path}.MatMul.weight_Q", codes)]
        given.append(self.constant(f"{path}.scales", (self.random.random(n * blocks) * 0.2 / 2**bits).astype("f")))
        if bits == 8:
            zeros = self.random.integers(100, 150, n * blocks, dtype=np.uint8)
            given.append(self.constant(f"{path}.zeros", zeros))
        return self.add(
            "MatMulNBits", f"{name}/MatMul_Q", x, *given, domain=DOMAIN, K=k, N=n, bits=bits, block_size=BLOCK
        )


def write_decoder(path: Path, layers: int = 2, window: int = -1) -> None:
    """Write layers with 4-bit query projections and 8-bit up projections; only symbolic axes name sizes."""
    b = _Builder()
    angles = np.outer(np.arange(128), 1 / 10000 ** (np.arange(0, DIM, 2) / DIM))
    b.constant("cos_cache", np.cos(angles).astype(np.float32))
    b.constant("sin_cache", np.sin(angles).astype(np.float32))
    b.constant("axis", np.array([1]))
    one = b.constant("one", np.array(1))
    count = b.add("ReduceSum", "/model/attn_mask/ReduceSum", "attention_mask", "axis", keepdims=0)
    lengths = b.add("Sub", "/model/attn_mask/Sub", count, one)
    lengths = b.add("Cast", "/model/attn_mask/Cast", lengths, to=TensorProto.INT32)
    total = b.add("Gather", "/model/attn_mask/Gather", b.add("Shape", "/model/attn_mask/Shape", "attention_mask"), one)
    total = b.add("Cast", "/model/attn_mask/Cast_1", total, to=TensorProto.INT32)

    def info(name: str, *axes: int | str, kind: int = TensorProto.FLOAT) -> Any:
        return helper.make_tensor_value_info(name, kind, axes)

    inputs = [
        info("input_ids", "batch_size", "sequence_length", kind=TensorProto.INT64),
        info("attention_mask", "batch_size", "total_sequence_length", kind=TensorProto.INT64),
    ]
    outputs = [info("logits", "batch_size", "sequence_length", VOCAB)]
    table = b.weight("model.embed_tokens.weight", VOCAB, HIDDEN)
    rest = b.add("Gather", "/model/embed_tokens/Gather", table, "input_ids")
    scale = b.weight("model.layers.0.input_layernorm.weight", HIDDEN)
    x = b.add("SimplifiedLayerNormalization", "/model/layers.0/input_layernorm/LayerNorm", rest, scale, epsilon=1e-5)

    def skipped(rest: str, x: str, name: str) -> tuple[str, str]:
        found = b.add(
            "SkipSimplifiedLayerNormalization", f"{node_path(name)}/Skip", rest, x, b.weight(f"{name}.weight", HIDDEN),
            outputs=4, domain=DOMAIN, epsilon=1e-5,
        )  # fmt: skip
        return found[0], found[3]

    for layer in range(layers):
        own, place = f"model.layers.{layer}", f"/model/layers.{layer}"
        q = b.linear(x, f"{own}.attn.q_proj", HIDDEN, HEADS * DIM, bits=4)
        k, v = (b.linear(x, f"{own}.attn.{n}_proj", HIDDEN, SHARED * DIM) for n in "kv")
        cache = [f"past_key_values.{layer}.{name}" for name in ("key", "value")]
        inputs += [info(name, "batch_size", SHARED, "past_sequence_length", DIM) for name in cache]
        present = [f"present.{layer}.{name}" for name in ("key", "value")]
        outputs += [info(name, "batch_size", SHARED, "total_sequence_length", DIM) for name in present]
        attended = f"{place}/attn/output"
        b.nodes.append(
            helper.make_node(
                "GroupQueryAttention", [q, k, v, *cache, lengths, total, "cos_cache", "sin_cache"],
                [attended, *present], name=f"{place}/attn/GroupQueryAttention", domain=DOMAIN, num_heads=HEADS,
                kv_num_heads=SHARED, do_rotary=1, local_window_size=window,
            )
        )  # fmt: skip
        x, rest = skipped(rest, b.linear(attended, f"{own}.attn.o_proj", HEADS * DIM, HIDDEN), f"{own}.post_norm")
        gate = b.linear(x, f"{own}.mlp.gate_proj", HIDDEN, INNER)
        gate = b.add("Mul", f"{place}/mlp/act/Mul", gate, b.add("Sigmoid", f"{place}/mlp/act/Sigmoid", gate))
        up = b.linear(x, f"{own}.mlp.up_proj", HIDDEN, INNER, bits=8)
        down = b.linear(b.add("Mul", f"{place}/mlp/Mul", gate, up), f"{own}.mlp.down_proj", INNER, HIDDEN)
        name = f"model.layers.{layer + 1}.input_layernorm" if layer + 1 < layers else "model.norm"
        x, rest = skipped(rest, down, name)
    head = b.weight("lm_head.weight", HIDDEN, VOCAB)
    b.nodes.append(helper.make_node("MatMul", [x, head], ["logits"], name="/lm_head/MatMul"))
    graph = helper.make_graph(b.nodes, "main", inputs, outputs, b.constants)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=9), path)
