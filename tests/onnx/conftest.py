"""Puts this folder, tests/graph and tests/ops on the path."""

from __future__ import annotations

import sys
from pathlib import Path

for _folder in ("graph", "ops", "onnx"):
    sys.path.append(str(Path(__file__).parents[1] / _folder))
