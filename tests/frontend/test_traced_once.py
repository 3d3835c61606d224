"""The tests' cache of traces: one for all checkpoints of a configuration, whatever their folders and their weights."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.interpret import interpret
from transformers import LlamaConfig

IDS = [3, 9, 27, 81, 4, 12, 36]


def test_one_trace_for_all_folders(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ICC_COMPILED_ONCE", str(tmp_path))

    def right(seed: int, **changes: Any) -> bool:
        config = LlamaConfig(**{**tiny.GQA, "num_hidden_layers": 1, "vocab_size": 119, **changes})
        model = tiny.save_tiny(config, folder := tmp_path / f"model{seed}", seed=seed)
        expected = tiny.reference_logits(model, IDS)
        return bool((interpret(load_graph(folder), IDS) - expected).abs().max() < 2e-5 * expected.abs().max())

    def kept() -> int:
        return len(list(tmp_path.glob("*.repeats")))

    assert right(0) and kept() == 1
    assert right(1) and kept() == 1  # other weights in another folder
    assert right(2, rms_norm_eps=1e-2) and kept() == 2
    assert right(3, rope_parameters={"rope_type": "default", "rope_theta": 50.0}) and kept() == 3


def test_what_is_read_back_is_what_was_written(tmp_path: Path) -> None:
    import traced_once
    from icc.compiler.frontend.export.trace import Traced

    program = torch.export.export(torch.nn.Linear(2, 3), (torch.zeros(1, 2),))
    traced_once._written(tmp_path / "trace", Traced(program, shortest=7))
    found = traced_once._read(tmp_path / "trace")
    assert (found.repeats, found.shortest) == ((), 7)
    assert [node.op for node in found.program.graph.nodes] == [node.op for node in program.graph.nodes]
