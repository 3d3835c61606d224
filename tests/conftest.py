"""Fixtures shared by all tests. `tiny` is the module tests/tiny_models.py: tests are not importable as a package."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

# Triton decides when it is first imported whether it interprets; compiling for a GPU happens in processes of its own.
os.environ["TRITON_INTERPRET"] = "1"
# Kernels that many tests need are compiled once in all processes of a run; see the fixture `compiler_runs`.
if "ICC_COMPILED_ONCE" not in os.environ:
    os.environ["ICC_COMPILED_ONCE"] = tempfile.mkdtemp(prefix="icc-compiled-once-")
    os.environ["ICC_COMPILED_BY"] = os.environ.get("CXX", "g++")
    os.environ["CXX"] = str(Path(__file__).with_name("compile_once"))


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["ICC_COMPILED_ONCE"], ignore_errors=True)


@pytest.fixture
def compiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the C++ compiler's own output, or of what happens while it works: it runs every time."""
    monkeypatch.setenv("CXX", os.environ["ICC_COMPILED_BY"])


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """Builders of tiny checkpoints: `tiny.tiny_configs()`, `tiny.save_tiny(config, path)`."""
    name = "tiny_models"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
