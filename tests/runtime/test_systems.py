"""macOS and Windows: the runtime can be imported, opens an engine, chooses the library for the system, and runs a fake
device, without features that only Linux has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from icc.runtime.errors import MissingIsaError
from icc.runtime.format.manifest import Library
from icc.runtime.system import SYSTEMS

SCRIPT = Path(__file__).with_name("other_system.py")


# Libraries for every system, each for several CPUs; their files are those of the toy engine.
LIBRARIES = [
    Library(level, f"kernels/{file}.so", flags, system)
    for system in SYSTEMS
    for level, file, flags in (
        ("avx512", "future", ["avx2", "avx512f"]),
        ("avx2", "any", ["avx2", "fma", "f16c"]),
        ("dotprod", "future", ["asimddp", "atomics"]),
    )
]


@pytest.mark.parametrize("system", ["darwin", "win32"])
@pytest.mark.parametrize("form", ["engine", "icc"])
def test_the_runtime_keeps_to_what_a_system_has(
    system: str, form: str, make_engine: Callable[..., Path], tmp_path: Path
) -> None:
    engine = make_engine(libraries=LIBRARIES)
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
    assert found["library"] == {"darwin": "avx2-macos", "win32": "avx2-windows"}[system]
    assert not any((tmp_path / "temporary").iterdir())


def test_an_engine_for_linux_says_so_elsewhere(make_engine: Callable[..., Path]) -> None:
    """The refusal is one line with a hint, without a traceback."""
    command = [sys.executable, str(SCRIPT), "darwin", str(make_engine(libraries=LIBRARIES[:3])), "run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == MissingIsaError.exit_code, done.stderr
    said = "this machine cannot run the engine: it has macos, the engine's kernels are for linux"
    assert said in done.stderr and "compile the model again with --os macos" in done.stderr
    assert "Traceback" not in done.stderr
