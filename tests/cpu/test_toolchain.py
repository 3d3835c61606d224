"""The C++ compilers: which one is chosen, and that kernels of clang from the package `ziglang` are as good as g++'s."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cpu_cases import small_products
from cpu_harness import Runner, flat_batch
from icc.compiler.backends import cxx
from icc.compiler.backends.cpu import toolchain
from icc.compiler.backends.cpu.build import build_libraries
from icc.compiler.backends.cpu.isa import ALL, AVX2, host_isas
from icc.compiler.backends.errors import ToolchainError
from icc.runtime.format.manifest import KERNEL_ABI
from icc.runtime.system import LINUX

CLANG = [sys.executable, "-m", "ziglang"]


@pytest.fixture(scope="module")
def by_zig(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of libraries of every level."""
    folder = tmp_path_factory.mktemp("zig") / "kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", cxx.ZIG)
        build_libraries(small_products().program(), folder, ALL, optimize="-O1")
    return folder


def test_the_compiler_is_the_one_named_else_gxx_else_clang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "sh")
    assert cxx.find_compiler() == ["sh"]
    monkeypatch.setenv("CXX", cxx.ZIG)
    assert cxx.find_compiler() == CLANG
    monkeypatch.delenv("CXX")
    assert cxx.find_compiler() == ["g++"]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert cxx.find_compiler() == CLANG
    monkeypatch.setattr(cxx, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match=r"g\+\+ is not installed") as error:
        cxx.find_compiler()
    assert "pip install ziglang" in str(error.value.hint) and error.value.exit_code == 31


def test_a_named_compiler_that_is_missing_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match="no-such-compiler is not installed"):
        cxx.find_compiler()


def test_a_library_by_zig_leaves_open_only_what_every_process_has(by_zig: Path) -> None:
    assert sorted(path.name for path in by_zig.iterdir()) == sorted(
        f"{isa.name}.{end}" for isa in ALL for end in ("cpp", "so")
    )
    for isa in ALL:
        library = str(by_zig / f"{isa.name}.so")
        found = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        symbols = set(re.findall(r"^ +[Uw] (\w+)", found.stdout, re.MULTILINE))
        assert symbols, found.stdout
        assert symbols <= toolchain.IMPORTS[LINUX], f"{isa.name}: {sorted(symbols - toolchain.IMPORTS[LINUX])}"


def test_zig_compiles_avx_vnni(by_zig: Path) -> None:
    command = ["objdump", "-d", "--no-show-raw-insn", str(by_zig / "avxvnni.so")]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "{vex} vpdpbusd" in found and not re.search(r"(?<!{vex} )vpdpbusd", found)


def test_a_library_by_zig_computes_what_gxx_says(by_zig: Path, tmp_path: Path) -> None:
    built = build_libraries(small_products().program(), tmp_path / "kernels", host_isas(), optimize="-O1")
    for library in built:
        other = by_zig / f"{library.isa}.so"
        assert ctypes.CDLL(str(other)).icc_abi_version() == KERNEL_ABI["cpu"]
        told = [_outputs(path) for path in (tmp_path / library.path, other)]
        assert any(np.any(values) for values in told[0].values())
        for name, values in told[0].items():
            np.testing.assert_allclose(told[1][name], values, rtol=1e-5, atol=1e-5, err_msg=name)


def _outputs(library: Path) -> dict[str, np.ndarray]:
    """Every buffer after a step of three tokens over an arena of the same random numbers."""
    runner = Runner(library, small_products())
    arena = runner.arena[: runner.arena.size // 4 * 4].view(np.float32)
    arena[:] = np.random.default_rng(1).standard_normal(arena.size)
    try:
        return runner.step(flat_batch(3), {})
    finally:
        runner.close()


def test_libraries_by_zig_are_the_same_bytes(by_zig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", cxx.ZIG)
    build_libraries(small_products().program(), tmp_path / "elsewhere" / "kernels", [AVX2], optimize="-O1")
    assert (tmp_path / "elsewhere/kernels/avx2.so").read_bytes() == (by_zig / "avx2.so").read_bytes()
