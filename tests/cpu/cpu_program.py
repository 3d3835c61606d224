"""The program of the op tests: every lowered op at odd shapes, and what to feed it."""

from __future__ import annotations

import os
import re

import numpy as np
from cpu_cases import add_changed, add_embedding, add_experts, add_linear, add_linear_q, add_norm, add_select_rows
from cpu_harness import Batch, Builder
from cpu_pointwise_cases import add_pointwise
from cpu_rowwise_cases import add_all_rowwise
from cpu_screen_case import NAMES, add_screened


def all_ops() -> Builder:
    """Every op except attention, and every pointwise opcode.

    The longest rows need panels beyond the scratch budget, and the largest top-k more pairs than are grouped at a time.
    If ICC_CPU_OPS is set, a pattern: only the cases whose names match it, so that the library compiles quickly.
    """
    b, rng = Builder(), np.random.default_rng(7)
    for k, n, fmt, extra, rows in (
        (1, 1, "f32", False, "tokens"), (17, 15, "bf16", True, "tokens"), (40, 16, "f16", True, "tokens"),
        (33, 17, "bf16", False, "logit_rows"), (64, 130, "bf16", True, "tokens"), (130, 81, "f32", True, "tokens"),
        (11000, 3, "f32", False, "tokens"),
    ):  # fmt: skip
        add_linear(b, rng, k, n, fmt, extra, rows)
    for k, n, fmt, group, extra in (
        (16, 1, "q4", 16, False), (96, 17, "q4", 32, True), (128, 15, "q4", 64, True), (256, 130, "q4", 128, True),
        (48, 33, "q8", 16, True), (256, 16, "q8", 128, False), (128, 81, "q8", 64, True),
        (44032, 2, "q4", 128, False), (96, 33, "q8s", 48, True), (256, 130, "q8s", 128, False),
        (48, 33, "i7", 16, True), (256, 130, "i7", 128, False),
    ):  # fmt: skip
        add_linear_q(b, rng, k, n, fmt, group, extra)
    for name in NAMES:
        add_screened(b, rng, name)
    for bits in (0, 4, 8):
        for topk, per_slot in ((3, False), (3, True), (150, False), (1, True)):
            add_experts(b, rng, bits, topk, per_slot)
    add_changed(b, rng, "bf16", codes=False)
    add_changed(b, rng, "f16", codes=True)
    for kind in ("rms_norm", "layer_norm"):
        for d, groups, add, weight in (
            (1, 1, False, True),
            (33, 1, False, True),
            (130, 1, True, True),
            (64, 3, False, False),
        ):
            add_norm(b, rng, kind, d, groups, add, weight)
    for fmt, n in (("f32", 7), ("bf16", 33), ("f16", 16), ("tile_bf16", 19), ("q4", 32), ("q8", 48), ("q8s", 48)):
        add_embedding(b, rng, fmt, n, "positions" if fmt == "f16" else "token_ids")
    for dtype in ("f32", "i32"):
        add_select_rows(b, 17, dtype)
    add_all_rowwise(b)
    add_pointwise(b)
    if pattern := os.environ.get("ICC_CPU_OPS"):
        keep(b, pattern)
    return b


def keep(b: Builder, pattern: str) -> None:
    """Remove cases whose names do not match, and the steps that write no output of the others."""
    b.cases = [case for case in b.cases if re.fullmatch(pattern, case.name)]
    names = {case.name for case in b.cases}
    outputs = [(step, [o.name.partition(".")[0] for o in step.outputs.values() if o]) for step in b.steps]
    b.steps = [step for step, written in outputs if names & set(written)]
    b.kernels = {step.kernel: step.op for step in b.steps}


def feeds_of(builder: Builder, batch: Batch, seed: int = 0) -> dict[str, np.ndarray]:
    rng, feeds = np.random.default_rng(seed), {}
    rows = {
        b.name: len(batch.arrays()["logit_rows"]) if b.rows == "logit_rows" else batch.tokens for b in builder.buffers
    }
    for case in builder.cases:
        for name, make in case.feeds.items():
            feeds[name] = make(rng, rows[name])
    return feeds
