"""`--sequence-parallel` for a GPU, compiled here: the launches of its plan, and their rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from icc.compiler.cli import main
from icc.passes.parallel.sequence import ROWS
from icc.runtime.format.load import open_engine
from icc.runtime.format.plan import OwnRows

pytestmark = pytest.mark.slow

SMALL = ("--max-seq-len", "64", "--max-batch-size", "1", "--max-step-tokens", str(ROWS))


def test_prompts_by_rows_compile_for_two_h100(compiled: Callable[..., Any], tmp_path: Path) -> None:
    """Steps of 32 tokens are divided, steps of 16 and decodes are not; no kernel may access memory outside its
    buffers."""
    engine = tmp_path / "e"
    args = ["compile", str(compiled("llama", dtype="bfloat16").checkpoint), "-o", str(engine), "--target", "h100"]
    result = CliRunner().invoke(main, [*args, "--tensor-parallel", "2", "--sequence-parallel", *SMALL])
    assert result.exit_code == 0, result.output
    opened = open_engine(engine, verify=False)
    plan = opened.program.plan
    opened.close()
    assert plan is not None and sum(call.own for call in plan.calls) == 5  # a norm, or a sum, after each sum of ranks
    assert [(phase.max_tokens, phase.decode, phase.own) for phase in plan.phases] == [
        (1, True, None), (16, False, None), (ROWS, False, OwnRows(2, ROWS)),
    ]  # fmt: skip
    decodes, _, prompts = plan.phases
    entries = [
        {plan.objects[launch.object].entry for many in phase.launches.values() for launch in many}
        for phase in (decodes, prompts)
    ]
    assert entries[0] & {"all_reduce", "reduce_scatter", "all_gather_rows"} == {"all_reduce"}
    assert entries[1] & {"all_reduce", "reduce_scatter", "all_gather_rows"} == {"reduce_scatter", "all_gather_rows"}
    for found in plan.objects.values():
        assert not any(fault.startswith("not shown") for fault in found.faults), (found.file, found.faults)
