"""Composite operators are decomposed node by node if nothing is lost by it: the graphs are those of torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from icc.compiler.frontend.export import decompose
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.printer import print_graph
from sizes import soak
from tiny_models import tiny_configs
from torch import Tensor, nn

FEW = ["mixtral"]  # overwrites a tensor that it has just made
KEPT = ("linear", "split")


@pytest.mark.parametrize("name", [*FEW, *soak(*(name for name in tiny_configs() if name not in FEW))])
def test_graphs_are_those_of_torch(
    name: str, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler_runs: None
) -> None:
    tiny.save_tiny(tiny.tiny_configs()[name], tmp_path)
    found = print_graph(load_graph(tmp_path), modules=True)
    monkeypatch.setattr(decompose, "_parts_of", lambda *_: None)
    assert found == print_graph(load_graph(tmp_path), modules=True)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def fresh(x: Tensor) -> Tensor:
    total = x.exp()
    before = total + 1.0
    total.div_(total.sum(-1, keepdim=True))
    return total.transpose(0, 1) @ before


def composed(x: Tensor) -> Tensor:
    shares = x.softmax(-1)
    before = shares + 1.0
    shares.mul_(2.0).add_(shares)
    return shares * before + torch.ones(4)


def viewed(x: Tensor) -> Tensor:
    total = x.exp()
    head = total[:, :2]
    total.div_(2.0)
    return head * total.sum(-1, keepdim=True)


def viewed_by_composite(x: Tensor) -> Tensor:
    total = x.exp()
    flat = total.reshape(-1)
    total.mul_(3.0)
    return flat


def an_operand_itself(x: Tensor) -> Tensor:
    same = x.exp().to(torch.float32)
    same.add_(1.0)
    return same


def another_type(x: Tensor) -> Tensor:
    half = x.to(torch.bfloat16) * 2.0
    half.mul_(x)
    return half


def through_a_view(x: Tensor) -> Tensor:
    total = x.exp()
    total[:, 1:3].zero_()
    return total


@pytest.mark.parametrize(
    ("function", "by_node"),
    [
        (fresh, True),
        (composed, True),
        (viewed, False),
        (viewed_by_composite, False),
        (an_operand_itself, False),
        (another_type, False),
        (through_a_view, False),
    ],
)
def test_what_is_written_over(
    function: Callable[[Tensor], Tensor], by_node: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values stay those of the function; if a view sees the overwritten values, torch decomposes."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        program = torch.export.export(Function(function), (x,), strict=False)
        found = decompose.decompose(program, KEPT)
    assert torch.equal(found.graph_module(x)[0], function(x))
    assert all(not getattr(n.target, "_schema", None) or not n.target._schema.is_mutable for n in found.graph.nodes)
    assert (found is program) == by_node
