"""Attention that writes the keys and values of its own step: bit-equal to a write followed by a read."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import msgspec
import pytest
import torch
from attention_cases import Layer, Step
from icc.compiler.backends.triton.kernels.attention import AttentionKernel
from icc.compiler.backends.triton.plan import kernel_of
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.program.steps.attention import NewKeys
from icc.runtime.format.operands import BufferOperand, Operand, WeightOperand
from interpreting import LIMITS, TUNER, run_kernel
from paged import DTYPES
from sizes import soak

DECODE = [(36, 1), (0, 1), (170, 1), (0, 0), (47, 1)]
MIXED = [(0, 19), (37, 4), (90, 1)]
LAYERS = {
    "grouped": Layer(8, 2, 64, 64, 64),
    "odd": Layer(6, 2, 24, 40, 8, "interleaved", window=20, sinks=True),
    "whole": Layer(3, 3, 72, 40),
    "many": Layer(67, 1, 16, 16),
}
USUAL = [("grouped", "bf16", True), ("odd", "i8", True), ("odd", "bf16", False)]
EVERY = [(name, cache, True) for name in LAYERS for cache in ("bf16", "f32", "i8", "f8", "i4", "i2")]


def joined(step: Step) -> tuple[AttentionKernel, dict[str, torch.Tensor]]:
    """The layer's kernel with writes, and its further operands."""
    layer, kind = step.layer, step.kind
    wide = {"k": layer.kv_heads * layer.key_dim + 5, "v": layer.kv_heads * layer.value_dim + 5}
    found = {f"new.{name}": torch.randn(step.tokens, width).to(DTYPES[kind]) for name, width in wide.items()}
    operands: dict[str, Operand] = {name: BufferOperand(name, kind, width, 1) for name, width in wide.items()}
    if step.cos is not None and step.sin is not None:
        found |= {"new.cos": step.cos, "new.sin": step.sin}
        operands |= {name: WeightOperand(name, "f32", 1) for name in ("cos", "sin")}
    own = step.kernel().step
    kernel: Any = kernel_of(msgspec.structs.replace(own, new=NewKeys(**operands), new_rotary=own.rotary))
    return kernel, found


@pytest.mark.parametrize(("name", "cache", "decode"), [*USUAL, *soak(*(case for case in EVERY if case not in USUAL))])
def test_the_same_bits(name: str, cache: str, decode: bool) -> None:
    """The slots of the new tokens hold other numbers before."""
    step = Step(LAYERS[name], DECODE if decode else MIXED, cache)
    kernel, new = joined(step)
    apart = deepcopy(step)
    batch = {
        "positions": torch.cat([step.positions(row) for row in range(len(step.sequences))]).to(torch.int32),
        "slot_mapping": step.slots(), "moves": torch.zeros(0, 2, dtype=torch.int32),
    }  # fmt: skip
    assert kernel.writer is not None
    given = [new[f"new.{part}"] for part in ("k", "v")] + [new.get(f"new.{part}") for part in ("cos", "sin")]
    run_kernel(kernel.writer, given, [], shape=Shape(step.tokens, decode), batch=batch, kv=apart.pool.bytes)
    assert not torch.equal(apart.pool.bytes, step.pool.bytes)
    expected = apart.run(decode)
    got = step.run(decode, kernel=kernel, more=new)
    assert torch.equal(step.pool.bytes, apart.pool.bytes) and torch.equal(got, expected)
    launches = [spec.entry for spec in kernel.launches(Shape(step.tokens, decode), LIMITS, TUNER)]
    folded = decode and name != "many"  # several programs share its query heads
    assert ("kv_write" in launches) != folded and launches[0] == "kv_move"
