"""Attention as Triton compiled it: what of it runs in PTX without a GPU has the right answers, inside of its memory."""

from __future__ import annotations

from typing import Any

import pytest
from attention_cases import Step
from icc.compiler.backends.triton import interpreter
from on_ptx import launch
from sizes import soak
from test_attention import LAYERS, MIXED, TOLERANCE


@pytest.mark.parametrize("how", soak({}, {"late": False}, {"late": False, "skewed": True}))
def test_codes_in_rows_of_24_bytes_are_read_where_they_are(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that an H100 ended with an illegal access: in PTX nothing is out of place or out of line. Copies land
    when they are waited for or at once, and warps run in step or one after the other."""
    monkeypatch.setattr(interpreter, "instead", lambda spec, grid, args: launch(spec, grid, args, "h100", **how))
    step = Step(LAYERS["odd"], MIXED, "i8", kind="f32")
    got, expected = step.run(False), step.expected()
    assert (got - expected).abs().max() / expected.abs().max() < TOLERANCE["i8"]
