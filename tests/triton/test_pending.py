"""Tokens that the step before has sampled."""

import torch
from icc.compiler.backends.triton.kernels.pending import Pending
from icc.compiler.backends.triton.spec import Shape
from interpreting import run_kernel


def test_pending_tokens_become_what_was_sampled() -> None:
    tokens = torch.tensor([7, -1, -3, 0, -2, -4] + [5] * 130, dtype=torch.int32)
    sampled = torch.tensor([40, 41, 42, -1], dtype=torch.int32)
    batch = {"token_ids": tokens, "sampled:token": sampled}
    run_kernel(Pending(), [torch.zeros(136)], [], shape=Shape(136, False), batch=batch)
    assert tokens.tolist() == [7, 40, 42, 0, 41, 0] + [5] * 130
