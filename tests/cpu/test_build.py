"""Building: deterministic bytes, clear errors, no dependencies beyond libc."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_cases import add_linear, add_linear_q
from cpu_harness import Builder, Runner, flat_batch
from icc.compiler.backends.cpu.build import build_libraries
from icc.compiler.backends.cpu.emit import emit_source
from icc.compiler.backends.cpu.isa import ALL, AVX2
from icc.compiler.backends.errors import CodegenError, ToolchainError
from icc.compiler.ops.body import Body
from icc.compiler.program.steps.base import Step
from icc.runtime.format.manifest import KERNEL_ABI
from step_making import make_step

CONSTANT: dict[str, Any] = {"shape": (4,), "walks": ((1,),)}
COPY = Body.parse("t0 = copy 1")


def small() -> Builder:
    b, rng = Builder(), np.random.default_rng(0)
    add_linear(b, rng, 8, 5, "f32", False, "tokens")
    add_linear_q(b, rng, 16, 17, "q4", 16, False)
    return b


def test_same_program_gives_the_same_bytes_in_any_directory(tmp_path: Path, compiler_runs: None) -> None:
    one = build_libraries(small().program(), tmp_path / "a" / "kernels", [AVX2], optimize="-O1")
    two = build_libraries(small().program(), tmp_path / "longer" / "path" / "kernels", [AVX2], optimize="-O1")
    assert one == two and one[0].path == "kernels/avx2.so" and one[0].cpu_flags == ["avx2", "fma", "f16c"]
    for name in ("avx2.cpp", "avx2.so"):
        assert (tmp_path / "a/kernels" / name).read_bytes() == (tmp_path / "longer/path/kernels" / name).read_bytes()
    assert sorted(p.name for p in (tmp_path / "a/kernels").iterdir()) == ["avx2.cpp", "avx2.so"]


def test_library_needs_only_libc_and_libm(tmp_path: Path) -> None:
    build_libraries(small().program(), tmp_path / "kernels", [AVX2], optimize="-O1")
    text = subprocess.run(
        ["readelf", "-d", "--dyn-syms", "-W", tmp_path / "kernels/avx2.so"], capture_output=True, text=True, check=False
    ).stdout
    assert set(re.findall(r"Shared library: \[(.*?)\]", text)) <= {"libc.so.6", "libm.so.6"}
    assert ctypes.CDLL(str(tmp_path / "kernels/avx2.so")).icc_abi_version() == KERNEL_ABI["cpu"]
    exported = re.findall(r"GLOBAL DEFAULT +\d+ (icc_\w+)", text)
    names = (
        "abi_version",
        "blake3",
        "create",
        "destroy",
        "inputs",
        "largest",
        "scratch",
        "section",
        "shared_touched",
        "step",
    )
    assert sorted(exported) == [f"icc_{name}" for name in names]


def test_equal_kernels_are_rendered_once() -> None:
    b = small()
    b.steps += b.steps
    source = emit_source(b.program(), AVX2)
    assert source.count("static void k0_linear(const Ctx& c)") == 1


def test_source_is_self_contained() -> None:
    assert not re.findall(r'#include ".*"', emit_source(small().program(), ALL[0]))


class Warp(Step, frozen=True, kw_only=True, tag="warp"):
    """An op that no back end knows."""


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Warp(), "the CPU backend has no kernel of op 'warp'"),
        (make_step("linear", k=4, n=4, stored="f8"), "unknown storage format 'f8'"),
        (make_step("linear_q", k=32, n=4, stored="q4g16"), "need rows of int8"),
        (make_step("linear_q", int8_rows=True, k=40, n=4, stored="q4g16"), "multiple of 16 that divides K = 40"),
        (make_step("linear_q", int8_rows=True, k=32, n=4, stored="q3g16"), "unknown storage format 'q3g16'"),
        (make_step("topk", outer=1, n=4, k=5), "k = 5 exceeds n = 4"),
        (make_step("pointwise", ["f32"], **CONSTANT, body=Body.parse("t0 = warp 1")), "no code for opcode 'warp'"),
        (make_step("pointwise", ["f32"], **CONSTANT, body=Body.parse("t0 = neg a0")), "reads a0 of 0 inputs"),
        (make_step("pointwise", ["f32"], shape=(4,), walks=((1, 1),), body=COPY), r"does not fit shape \[4\]"),
        (make_step("pointwise", ["f64"], **CONSTANT, body=COPY), "unknown dtype 'f64'"),
    ],
)
def test_refusals(step: Step, message: str) -> None:
    b = small()
    b.step(step)
    with pytest.raises(CodegenError, match=message) as error:
        emit_source(b.program(), AVX2)
    assert error.value.exit_code == 30


def test_missing_compiler_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match="no-such-compiler is not installed") as error:
        build_libraries(small().program(), tmp_path / "kernels", [AVX2])
    assert error.value.exit_code == 31 and error.value.cmd[0] == "no-such-compiler" and "\n" not in str(error.value)


def test_failing_compiler_shows_its_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "cxx"
    script.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(ToolchainError, match="no such thing") as error:
        build_libraries(small().program(), tmp_path / "kernels", [AVX2])
    assert "x.cpp:1" in error.value.stderr


def test_library_refuses_nonsense_and_survives_many_handles(tmp_path: Path) -> None:
    (library,) = build_libraries(small().program(), tmp_path / "kernels", [AVX2], optimize="-O1")
    b = small()
    for threads in (1, 19, 4, 2):  # 19: barriers of three groups
        runner = Runner(tmp_path / library.path, b, threads)
        for _ in range(20):
            runner.step(flat_batch(3), {})
        assert runner.library.icc_step(runner.handle, None) == 1
        runner.close()
    assert runner.library.icc_create(0, None, None, None, 0) is None
