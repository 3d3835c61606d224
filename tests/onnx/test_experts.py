"""Experts that TorchScript exported as a loop: one product with the experts that each token picked."""

from __future__ import annotations

import warnings
from pathlib import Path

import onnx
import pytest
import torch
from icc.compiler.errors import UnsupportedModel
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.interpret import interpret
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.registry import parse_passes
from onnx_running import feeds, session
from torch import Tensor, nn

IDS = [5, 7, 9, 3, 20, 11, 40, 60]
WIDTH, EXPERTS, PICKED = 32, 3, 2


class Expert(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 96, bias=bias), nn.Linear(48, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


class Mixture(nn.Module):
    """The loop over experts of transformers 4 in Mixtral, Qwen and OLMoE."""

    def __init__(self, bias: bool, alone: int = -1) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(bias) for _ in range(EXPERTS))
        self.alone = alone  # an expert that the loop skips

    def forward(self, hidden: Tensor) -> Tensor:
        batch, tokens, width = hidden.shape
        x = hidden.view(-1, width)
        weights, picked = torch.topk(self.gate(x).softmax(dim=1), PICKED, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        total = torch.zeros((batch * tokens, width))
        mask = nn.functional.one_hot(picked, num_classes=EXPERTS).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            if number != self.alone:
                slot, token = torch.where(mask[number])
                rows = x[None, token].reshape(-1, width)
                total.index_add_(0, token, expert(rows) * weights[token, slot, None])
        return total.reshape(batch, tokens, width)


class Model(nn.Module):
    def __init__(self, *mixtures: Mixture) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(64, WIDTH), nn.ModuleList(mixtures)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


def written(model: nn.Module, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(), (torch.tensor([IDS]),), str(path), input_names=["input_ids"], output_names=["logits"],
            dynamic_axes={"input_ids": {0: "batch", 1: "sequence"}}, opset_version=17, dynamo=False,
        )  # fmt: skip
    return path


def test_a_loop_over_experts_is_a_product_with_those_picked(tmp_path: Path) -> None:
    """With biases and without: onnxruntime's logits, and three products instead of two per expert."""
    torch.manual_seed(0)
    path = written(Model(Mixture(bias=True), Mixture(bias=False)), tmp_path / "model.onnx")
    assert "NonZero" in {node.op_type for node in onnx.load(path).graph.node}
    found = session(path)
    [wanted] = found.run(None, feeds(found, IDS))
    graph = load_graph(path, 64)
    run_passes(graph, parse_passes("canonicalize"), PassContext())
    torch.testing.assert_close(interpret(graph, IDS), torch.from_numpy(wanted[0]), rtol=0, atol=2e-6)
    products = [node for node in graph.nodes if "expert_linear" in str(node.target)]
    assert len(products) == 4
    assert {graph.weight(node.args[1]).shape for node in products} == {(3, 96, WIDTH), (3, WIDTH, 48)}  # type: ignore[arg-type]


def test_an_expert_that_is_left_out_is_named(tmp_path: Path) -> None:
    path = written(Model(Mixture(bias=False, alone=1)), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModel, match="2 of 3 experts"):
        load_graph(path, 64)
