"""int8 rows times int8 matrices: the interpreted plan against a float64 reference."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from building import build
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import eager
from icc.compiler.ops import OPS
from icc.compiler.weights.formats.channel import ChannelInt8
from icc.compiler.weights.handles import pieces_of
from torch import fx

IDS = [3, 17, 4, 44, 9, 2, 11, 30]


def reference(graph: Graph, ids: list[int]) -> torch.Tensor:
    """Logits in float64, with the inputs of int8 layers rounded as the kernels round them."""
    linear = OPS["linear"].overload
    env: dict[fx.Node, Any] = {}
    inputs = {"token_ids": torch.tensor(ids)}
    for node in graph.nodes:
        if node.op == "get_attr":
            value = graph.weight(node).load()
            env[node] = value.double() if value.is_floating_point() else value
        elif node.op == "placeholder":
            env[node] = inputs.get(str(node.target), torch.arange(len(ids)))
        elif node.op == "call_function":
            args = fx.map_arg(node.args, lambda n: env[n])
            if node.target is linear and isinstance(pieces_of(graph.weight(node.args[1]))[0].storage, ChannelInt8):
                scale = args[0].abs().amax(-1, keepdim=True) / 127
                args = ((args[0] / scale + 0.5).floor() * scale, *args[1:])
            env[node] = eager(node.target)(*args, **node.kwargs)
    return env[graph.output]


def test_interpreted_plan(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path / "m")
    engine = build(tmp_path / "m", "int8")
    assert sum(spec.entry == "linear_int8" for spec in engine.specs.values()) >= 3
    expected = reference(engine.graph, IDS).float().numpy()
    with engine.llm() as llm:
        found = llm.logits(IDS)
    assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()
