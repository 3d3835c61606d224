"""Heads whose logits are screened: with codes as rounding gives them, and with codes that could mislead the screen."""

from __future__ import annotations

import numpy as np
from cpu_cases import add_quantize, dequantize
from cpu_harness import Builder, Case
from icc.compiler.backends.cpu.layouts.split import SplitTiles
from icc.compiler.backends.cpu.layouts.tiles import stored_scales
from icc.compiler.program.layout import Stored
from icc.compiler.program.steps.linear import LinearQ
from icc.compiler.weights.formats.affine import GroupAffine

K, N, GROUP = 128, 5003, 32
FIRST, SECOND = 77, 4900
NAMES = ("screened", "screened_twins", "screened_leaning")


def head(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [N, K] and scales [N, groups]; zero points are 128.

    twins: two rows are equal. leaning: of two similar rows, the first has the larger logit, mostly from its low
    nibbles.
    """
    rng = np.random.default_rng(3)
    codes = np.clip(np.rint(rng.standard_normal((N, K)) * 32) + 128, 1, 255).astype(np.uint8)
    scales = rng.uniform(0.005, 0.01, (N, K // GROUP)).astype(np.float32)
    if name == "screened_twins":
        codes[SECOND], scales[SECOND] = codes[FIRST], scales[FIRST]
    if name == "screened_leaning":
        signs = np.where(codes[FIRST] > 128, 1, -1)
        codes[FIRST], codes[SECOND] = 128 + 127 * signs, 128 + 120 * signs
        scales[FIRST], scales[SECOND] = 0.01, 0.01045
    return codes, scales


def add_screened(b: Builder, rng: np.random.Generator, name: str, leans: bool = True) -> None:
    """A head and activations in line with its first row. leans: keep the statistics of low nibbles in the packed
    weight."""
    codes, scales = head(name)
    zeros = np.full((N, K // GROUP), 128, np.uint8)
    packed = SplitTiles.of(GroupAffine(GROUP, 8)).pack({"codes": codes, "scales": scales, "zeros": zeros})
    if not leans:
        high = packed[: len(packed) * (64 + 8 * GROUP) // (64 + 16 * GROUP)]
        high.reshape(-1, 64 + 8 * GROUP)[:, 56:60] = 0
    weights = (codes.astype(np.float64).reshape(N, -1, GROUP) - 128) * stored_scales(scales)[..., None]
    rows = add_quantize(b, name, K, GROUP, False)
    near = codes[FIRST].astype(np.float32) / 32 - 4
    noise = np.float32(0.01 if name == "screened_leaning" else 1.0)
    b.cases[-1].feeds[f"{name}.x"] = lambda rng, rows: near + noise * rng.standard_normal((rows, K), np.float32)
    y = b.buffer(f"{name}.y", [N])
    bias = rng.standard_normal(N).astype(np.float32) / 100
    bias[SECOND] = bias[FIRST]
    w, added = b.weight(f"{name}.w", packed, "q8s", (N, K)), b.plain(f"{name}.b", bias)
    b.step(LinearQ(x=rows, w=w, bias=added, y=y, k=K, n=N, stored=Stored(f"q8g{GROUP}", "screen"), screened=True))

    def expect(a: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = dequantize(a[f"{name}.q"], a[f"{name}.s"].astype(np.float64))
        return {y.name: x @ weights.reshape(N, K).T + bias}

    b.cases.append(Case(name, {}, expect, 1e-5))
