"""`--device`: all operands of a calibration are moved to the device, and its results are moved back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from icc.compiler.graph.graph import Graph
from icc.compiler.weights.handles import QuantizedWeight
from icc.passes.base import Pass, PassContext
from icc.passes.manager import run_passes
from icc.passes.quantize.awq import QuantizeAwq
from icc.passes.quantize.gptq import QuantizeGptq
from icc.passes.quantize.smooth import QuantizeSmooth
from other_device import DEVICE, There, other_device
from sizes import soak

TEXT = [torch.randint(0, 48, (24,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(2)]


def uneven(b) -> Graph:
    """A gated MLP whose inputs have a channel that is larger than the others."""
    scale = torch.ones(64)
    scale[7] = 20.0
    x = b.op("rms_norm", b.embed(64), b.constant("norm", scale), 1e-6)
    gate = b.aten("silu", b.linear(x, "gate", 48, 64))
    h = b.linear(b.aten("mul.Tensor", gate, b.linear(x, "up", 48, 64)), "down", 64, 48)
    return b.finish(b.linear(b.aten("tanh", h), "head", 48, 64))


def ways(device: str) -> dict[str, list[Pass]]:
    options = {"sequences": TEXT, "device": device}
    return {
        "gptq": [QuantizeGptq(**options)],
        "awq": [QuantizeAwq(**options)],
        "int8": [QuantizeSmooth(**options)],
        "awqgptq": [QuantizeAwq(**options, rounds=False, for_gptq=True), QuantizeGptq(**options, sweeps=2)],
    }


def found(graph: Graph, passes: list[Pass], kept: Path) -> dict[str, dict[str, torch.Tensor]]:
    run_passes(graph, passes, PassContext(calibrations=kept))
    return {name: weight.parts() for name, weight in graph.weights.items() if isinstance(weight, QuantizedWeight)}


@pytest.mark.parametrize("way", ["gptq", "awq", "int8", *soak("awqgptq")])
def test_codes_are_those_of_the_cpu(way: str, new_builder, tmp_path: Path) -> None:
    expected = found(uneven(new_builder()), ways("cpu")[way], tmp_path / "a")
    with other_device() as ran:
        there = found(uneven(new_builder()), ways(DEVICE.type)[way], tmp_path / "b")
    assert "mm" in ran and "clamp" in ran, "nothing was computed there"
    assert there.keys() == expected.keys() and len(there) == 4
    for name, parts in there.items():
        for part, value in parts.items():
            assert not isinstance(value, There), f"{name}: {part} stayed there"
            assert torch.equal(value, expected[name][part]), f"{name}: {part}"


def test_mixed_devices_are_found() -> None:
    """The device of these tests is as strict as a GPU."""
    with other_device(), pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(3, 3).to(DEVICE) @ torch.ones(3, 3)
