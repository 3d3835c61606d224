"""One library per ISA level for all op cases, built once per session."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "formats"))

import pytest
from cpu_harness import Builder
from cpu_program import all_ops
from icc.compiler.backends.cpu.build import build_libraries
from icc.compiler.backends.cpu.isa import host_isas


@pytest.fixture(scope="session")
def ops_program() -> Builder:
    return all_ops()


@pytest.fixture(scope="session")
def ops_libraries(ops_program: Builder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """ISA name -> shared object, for the levels that this machine runs."""
    folder = tmp_path_factory.mktemp("ops") / "kernels"
    libraries = build_libraries(ops_program.program(), folder, host_isas(), optimize="-O1")
    return {library.isa: folder.parent / library.path for library in libraries}
