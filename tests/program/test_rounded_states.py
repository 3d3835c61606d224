"""--state-cache bf16: matrices take half the memory, other states do not change, and models without matrices are
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from icc.compiler.backends.registry import backend_for
from icc.compiler.caches import lower_options
from icc.compiler.errors import UsageError
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.options import CompileOptions
from icc.compiler.program.lower import lower
from icc.compiler.program.steps.state import GatedScan, SelectiveScan, words
from icc.compiler.program.verify import verify_lowered
from icc.compiler.targets import find_target
from icc.runtime.format.manifest import Limits
from run_lowered import optimize
from sizes import soak

LIMITS = Limits(128, 4, 48)


def traced(tiny: Any, name: str, folder: Path) -> Graph:
    tiny.save_tiny(tiny.tiny_configs()[name], folder)
    return load_graph(folder, 128)


@pytest.mark.parametrize("target", ["cpu", *soak("h100")])
def test_what_is_halved(target: str, tiny: Any, tmp_path: Path) -> None:
    graph = optimize(traced(tiny, "qwen3_next-delta_rule", tmp_path))
    backend, found = backend_for(find_target(target), "f32"), {}
    for kept in ("f32", "bf16"):
        options = CompileOptions(tmp_path, tmp_path / "e", target=target, state_cache=kept)
        program = lower(graph, lower_options(graph, options, backend, LIMITS)).program
        verify_lowered(program, backend.refusal)
        group = program.kv.groups[-1]
        assert group.holds_states and group.dtype == kept
        found[kept] = {number: layer.state for number, layer in group.layers.items()}
        steps = {step.layer: step for step in program.steps if isinstance(step, GatedScan | SelectiveScan)}
    for number, whole in found["f32"].items():
        step = steps.get(number)
        saved = 0 if step is None else step.heads * (step.chunk and step.key_dim * step.columns // 2)
        if step is not None and not step.chunk:
            matrices = step.heads * step.key_dim * step.value_dim
            assert whole == matrices and found["bf16"][number] == words(matrices, True)
        else:
            assert found["bf16"][number] == whole - saved


def test_who_has_no_such_state_is_told(tiny: Any, tmp_path: Path) -> None:
    graph = traced(tiny, "lfm2-short_convolutions", tmp_path)
    options = CompileOptions(tmp_path, tmp_path / "e", target="cpu", state_cache="bf16")
    with pytest.raises(UsageError, match="no layer of the model has a matrix"):
        lower_options(graph, options, backend_for(find_target("cpu"), "f32"), LIMITS)
    with pytest.raises(UsageError, match="--state-cache 'int8' is unknown"):
        CompileOptions(tmp_path, tmp_path / "e", state_cache="int8")
