"""Pending tokens: those that the previous step samples."""

import torch
from icc.compiler.backends.triton.interpreter import run_spec
from icc.compiler.backends.triton.kernels.pending import PendingKernel
from icc.compiler.backends.triton.spec import Shape
from icc.runtime.format.plan import BatchArg, SampledArg, SizeArg
from interpreting import LIMITS, TUNER


def test_pending_tokens_become_what_was_sampled() -> None:
    tokens = torch.tensor([7, -1, -3, 0, -2, -4] + [5] * 130, dtype=torch.int32)
    sampled = torch.tensor([40, 41, 42, -1], dtype=torch.int32)
    values = {BatchArg("token_ids"): tokens, SampledArg("token"): sampled, SizeArg("num_tokens"): 136}
    for spec in PendingKernel().launches(Shape(136, False), LIMITS, TUNER):
        run_spec(spec, values, {"num_tokens": 136})
    assert tokens.tolist() == [7, 40, 42, 0, 41, 0] + [5] * 130
