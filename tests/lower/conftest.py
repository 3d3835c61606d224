"""Puts the test modules of this folder and the graph tracer (tests/graph/graph_tracing.py) on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
