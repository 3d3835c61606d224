"""Engines with adapter slots, each compiled once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "formats"))
from icc.compiler.driver import compile_engine
from icc.compiler.options import CompileOptions
from icc.compiler.progress import Reporter


@pytest.fixture(scope="session")
def model(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny checkpoint in float32 by its name in tests/tiny_models.py."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name.split("-")[0]) / "model"
            tiny.save_tiny(tiny.tiny_configs()[name], made[name])
        return made[name]

    return make


@pytest.fixture(scope="session")
def engine(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """An engine of a tiny checkpoint: `engine("llama", adapters="2x16")`."""
    made: dict[Any, Path] = {}

    def make(name: str, **options: Any) -> Path:
        key = name, *sorted(options.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp("engines") / "engine"
            asked = {"target": "native", "max_seq_len": 64, **options}
            compile_engine(CompileOptions(model=model(name), output=made[key], **asked), Reporter())
        return made[key]

    return make
