"""Runs rendered Triton sources on CPU tensors with Triton's interpreter (tests/conftest.py sets TRITON_INTERPRET)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from icc.compiler.backends.triton.interpreter import run_spec
from icc.compiler.backends.triton.spec import LaunchSpec, Shape, TritonKernel
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.targets import TARGETS
from icc.runtime.format.manifest import Limits

LIMITS = Limits(max_seq_len=256, max_batch_size=16, max_step_tokens=128)
TUNER = Tuner(TARGETS["h100"])


def run_kernel(
    kernel: TritonKernel,
    inputs: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor],
    *,
    shape: Shape,
    batch: dict[str, torch.Tensor] | None = None,
    sizes: dict[str, int] | None = None,
    kv: torch.Tensor | None = None,
    limits: Limits = LIMITS,
    tuner: Tuner = TUNER,
) -> list[LaunchSpec]:
    """Run all launches of a kernel for one step; outputs are written in place. Scratch begins as NaN bytes (0xff).

    batch: the int32 arrays of the batch by name. sizes: num_tokens and so on; by default num_tokens rows of outputs[0].
    """
    rows = outputs[0].shape[0] if outputs else inputs[0].shape[0]  # type: ignore[union-attr]
    known = {"num_tokens": rows, "num_seqs": rows, "num_logit_rows": rows, "max_blocks": 1, "num_blocks": 1}
    known["num_moves"] = 0
    known |= sizes or {}
    values: dict[str, torch.Tensor | int] = dict(known)
    values |= {f"input:{i}": t for i, t in enumerate(inputs) if t is not None}
    values |= {f"output:{i}": t for i, t in enumerate(outputs)} | (batch or {})
    if kv is not None:
        values["kv"] = kv
    for name, nbytes in kernel.scratch(shape, limits, tuner).items():
        values[f"scratch:{name}"] = torch.full((nbytes,), 255, dtype=torch.uint8)
    specs = kernel.launches(shape, limits, tuner)
    for spec in specs:
        run_spec(spec, values, known)
    return list(specs)
