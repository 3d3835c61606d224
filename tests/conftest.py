"""Fixtures shared by all tests. `tiny` is the module tests/tiny_models.py: tests are not importable as a package."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

# Triton decides when it is first imported whether it interprets; compiling for a GPU happens in processes of its own.
os.environ["TRITON_INTERPRET"] = "1"


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
