"""Fixtures for grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .walks import Walker


@pytest.fixture(scope="session")
def walker() -> Walker:
    return Walker()


@pytest.fixture(scope="session")
def suite() -> dict[str, list[dict[str, Any]]]:
    """Groups of the JSON-Schema-Test-Suite by file; each has a description, a schema, and tests [data, valid]."""
    return json.loads((Path(__file__).parent / "suite" / "draft2020-12.json").read_text())
