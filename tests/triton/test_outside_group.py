"""A cache group of another kind in an interpreted GPU plan: its block tables have holes between kept blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from building import build
from icc import SamplingParams
from icc.compiler.graph.interpret import interpret
from icc.runtime.format.manifest import Limits
from icc.runtime.kv.policy import POLICIES
from icc.runtime.kv.sequence import NO_BLOCK
from kv_policies import Sinks

SINKS, NEW = 3, 4


def test_a_group_of_another_kind(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group keeps the first block besides its window, but kernels do not read this block: tokens are the
    model's."""
    monkeypatch.setitem(POLICIES, "sinks", lambda size: Sinks(SINKS, size))
    tiny.save_tiny(tiny.tiny_configs()["gemma2"], tmp_path)
    engine = build(tmp_path, "none", Limits(max_seq_len=24, max_batch_size=1, max_step_tokens=16), block_size=4)
    kv = engine.program.kv
    groups = [msgspec.structs.replace(g, keeps="sinks") if g.keeps == "window" else g for g in kv.groups]
    program = msgspec.structs.replace(engine.program, kv=msgspec.structs.replace(kv, groups=tuple(groups)))
    prompt = np.random.default_rng(0).integers(3, 119, 15).tolist()
    with replace(engine, program=program).llm(num_blocks=16) as llm:
        number = next(n for n, group in enumerate(llm.executor.groups) if isinstance(group.policy, Sinks))
        tables: list[tuple[int, ...]] = []
        submit = llm.executor.submit

        def watched(batch: Any, rows: Any) -> Any:
            tables.extend(sequence.block_tables[number] for sequence in batch.sequences)
            return submit(batch, rows)

        llm.executor.submit = watched  # type: ignore[method-assign]
        [found] = llm.generate([prompt], SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True))
    ids = list(prompt)
    for token in found.token_ids:
        assert token == int(interpret(engine.graph, ids, [len(ids) - 1])[0].argmax())
        ids.append(token)
    assert all(table[0] != NO_BLOCK for table in tables)
    assert any(NO_BLOCK in table for table in tables)
