"""Puts this folder's modules, and those of tests, tests/graph, tests/program and tests/triton, on the path."""

from __future__ import annotations

import sys
from pathlib import Path

for _folder in ("..", "../graph", "../program", "../triton", "."):
    sys.path.insert(0, str((Path(__file__).parent / _folder).resolve()))
