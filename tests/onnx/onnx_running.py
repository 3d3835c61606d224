"""onnxruntime as an oracle: its results for an exported graph, which `onnx` checks first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from icc.compiler.graph.graph import Graph
from icc.compiler.onnx.export import export_graph
from icc.compiler.onnx.write import write_model


def session(path: Path, exact: bool = False) -> onnxruntime.InferenceSession:
    """A session over a file. exact: without optimizations, which quantize activations for quantized weights."""
    options = onnxruntime.SessionOptions()
    if exact:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def feeds(found: onnxruntime.InferenceSession, ids: list[int], batch: int = 1) -> dict[str, Any]:
    """The inputs of a session for one sequence, or for `batch` copies of it."""
    tokens = len(ids)
    known = {
        "input_ids": np.array([ids] * batch, np.int64),
        "position_ids": np.tile(np.arange(tokens), (batch, 1)),
        "attention_mask": np.ones((batch, tokens), np.int64),
        "token_type_ids": np.zeros((batch, tokens), np.int64),
        "logit_rows": np.arange(tokens),
    }
    return {i.name: known[i.name] if i.name in known else _nothing(i.shape) for i in found.get_inputs()}


def _nothing(shape: list[Any]) -> np.ndarray:
    """An empty KV cache for one sequence."""
    sizes = [1 if axis == 0 else 0 if isinstance(size, str) else size for axis, size in enumerate(shape)]
    return np.zeros(sizes, np.float32)


def run_exported(graph: Graph, path: Path, ids: list[int], external: bool = False) -> np.ndarray:
    """The logits [T, vocab] of the exported graph; asserts that the file is valid and that shapes can be inferred."""
    write_model(export_graph(graph), path, external)
    onnx.checker.check_model(str(path), full_check=True)
    found = session(path)
    [logits] = found.run(["logits"], feeds(found, ids))
    return np.asarray(logits).reshape(-1, logits.shape[-1])
