"""Runs rendered Triton sources on CPU tensors with Triton's interpreter (tests/conftest.py sets TRITON_INTERPRET)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from icc.compiler.backends.triton.interpreter import run_spec
from icc.compiler.backends.triton.plan import kernel_of
from icc.compiler.backends.triton.spec import LaunchSpec, Shape, StepKernel
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.targets import TARGETS
from icc.runtime.format.manifest import Limits
from icc.runtime.format.plan import COUNTERS, BatchArg, CountersArg, KVArg, LaunchArg, OperandArg, ScratchArg, SizeArg
from step_making import make_step, operand_names

LIMITS = Limits(max_seq_len=256, max_batch_size=16, max_step_tokens=128)
TUNER = Tuner(TARGETS["h100"])


def make_kernel(op: str, **facts: Any) -> StepKernel[Any]:
    """The kernel of a step made by `make_step`."""
    return kernel_of(make_step(op, **facts))


def run_kernel(
    kernel: StepKernel[Any],
    inputs: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor],
    *,
    shape: Shape,
    batch: dict[str, torch.Tensor] | None = None,
    sizes: dict[str, int] | None = None,
    kv: torch.Tensor | None = None,
    limits: Limits = LIMITS,
    tuner: Tuner = TUNER,
    more: dict[str, torch.Tensor] | None = None,
    wraps: bool = False,
) -> list[LaunchSpec]:
    """Run all launches of a kernel for one step; outputs are written in place. Scratch memory begins as NaN bytes
    (0xff), counters as zeros; asserts that counters are zeros after each launch.

    inputs, outputs: in the order of `operand_names`; None if one is absent. more: other operands by name. batch: the
    int32 arrays of the batch by name. sizes: num_tokens and so on; by default num_tokens rows of outputs[0]. wraps:
    sums of integers may leave their type's range.
    """
    rows = outputs[0].shape[0] if outputs else inputs[0].shape[0]  # type: ignore[union-attr]
    known = {"num_tokens": rows, "num_seqs": rows, "num_logit_rows": rows, "max_blocks": 1, "num_blocks": 1}
    known["num_moves"] = 0
    known |= sizes or {}
    values: dict[LaunchArg, torch.Tensor | int] = {SizeArg(name): size for name, size in known.items()}
    values |= {BatchArg(name): array for name, array in (batch or {}).items()}
    names = [name for group in operand_names(kernel.step) for name in group]
    tensors = zip(names, (*inputs, *outputs), strict=True)
    values |= {OperandArg(name): tensor for name, tensor in tensors if tensor is not None}
    values |= {OperandArg(name): tensor for name, tensor in (more or {}).items()}
    if kv is not None:
        values[KVArg()] = kv
    for name, nbytes in kernel.scratch(shape, limits, tuner).items():
        values[ScratchArg(name)] = torch.full((nbytes,), 255, dtype=torch.uint8)
    counters = values[CountersArg()] = torch.zeros(COUNTERS * known["num_seqs"], dtype=torch.int32)
    specs = kernel.launches(shape, limits, tuner)
    for spec in specs:
        run_spec(spec, values, known, check_overflow=not wraps)
        assert not counters.any()
    return list(specs)
