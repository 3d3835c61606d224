"""Calibration's attention agrees with the op's reference, also without a causal mask."""

from __future__ import annotations

import torch
from icc.compiler.ops import OPS
from icc.passes.quantize.forward import fast


def test_every_sample() -> None:
    op = OPS["attention"]
    assert op.samples is not None
    torch.manual_seed(0)
    for args in op.samples():
        torch.testing.assert_close(fast(op.overload)(*args), op.reference(*args), atol=1e-5, rtol=1e-5)
