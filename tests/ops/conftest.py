"""Puts this folder's modules, tests/graph and tests/program on the path: tests are not importable as a package."""

from __future__ import annotations

import sys
from pathlib import Path

for _folder in ("graph", "ops", "program"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _folder))
