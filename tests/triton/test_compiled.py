"""Attention as Triton compiled it: kernels whose PTX runs without a GPU give right results within their memory."""

from __future__ import annotations

from typing import Any

import pytest
from attention_cases import Layer, Step
from icc.compiler.backends.triton import interpreter
from on_ptx import launch
from sizes import soak
from test_attention import LAYERS, MIXED, TOLERANCE

HEADS = {"24": LAYERS["odd"], "40": Layer(6, 2, 40, 24, 16), "100": Layer(4, 2, 100, 100, 100)}
ORDERS: tuple[dict[str, Any], ...] = ({}, {"late": False}, {"late": False, "skewed": True})


CASES = [("24", "f8", {}), ("40", "i8", {}), *(("100", cache, {}) for cache in ("i8", "f8", "bf16"))]


@pytest.mark.parametrize(("heads", "cache", "how"), soak(*(("24", "i8", how) for how in ORDERS), *CASES))
@pytest.mark.parametrize("decode", [False, True])
def test_vectors_of_odd_sizes_are_read_where_they_are(
    heads: str, cache: str, how: dict[str, Any], decode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like the kernel that failed on an H100 with an illegal access, when vectors of 24 codes took 24 bytes: no access
    of the PTX is out of bounds or misaligned. Copies complete when they are waited for or at once, and warps run in
    lockstep or one after the other."""
    monkeypatch.setattr(interpreter, "instead", lambda spec, grid, args: launch(spec, grid, args, "h100", **how))
    step = Step(
        HEADS[heads], [(36, 1), (0, 1), (70, 1)] if decode else MIXED, cache, kind="f32" if heads == "24" else ""
    )
    got, expected = step.run(decode), step.expected()
    assert (got - expected).abs().max() / expected.abs().max() < TOLERANCE[cache]
