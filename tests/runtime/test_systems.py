"""macOS and Windows: the runtime is imported, opens an engine and runs a fake device without what only Linux has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("other_system.py")


@pytest.mark.parametrize("system", ["darwin", "win32"])
@pytest.mark.parametrize("form", ["engine", "icc"])
def test_the_runtime_keeps_to_what_a_system_has(
    system: str, form: str, make_engine: Callable[..., Path], tmp_path: Path
) -> None:
    engine = make_engine()
    if form == "icc":
        from icc.compiler.packing import pack_engine

        pack_engine(engine, engine := tmp_path / "toy.icc")
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    command = [sys.executable, str(SCRIPT), system, str(engine)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["text"] and found["codes"] == [0, 0]
    assert not any((tmp_path / "temporary").iterdir())
