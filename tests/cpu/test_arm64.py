"""arm64, compiled on x86: the instructions in its libraries, which CPU loads which, and what other CPUs are told.

Where ICC_ARM64_PYTHON names an arm64 Python (tests/arm64_python.sh makes one), `ICC_SOAK=1 pytest` of this file runs
whole engines there, too.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections import Counter
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import icc
import numpy as np
import pytest
from cpu_arm64 import ARM64_PYTHON, needs_arm64
from cpu_cases import add_linear_q
from cpu_harness import Builder
from icc.compiler.backends import cxx
from icc.compiler.backends.cpu import backend, toolchain
from icc.compiler.backends.cpu.build import build_libraries
from icc.compiler.backends.cpu.emit import emit_source
from icc.compiler.backends.cpu.isa import ALL, DOTPROD, I8MM, LEVELS, Isa, find_isas
from icc.compiler.backends.cpu.kernels.linear import blocks_of
from icc.compiler.backends.cpu.kernels.matrix import lane_count, matrix_count
from icc.compiler.backends.cpu.layouts.affine import NIBBLES
from icc.compiler.backends.errors import ToolchainError
from icc.compiler.errors import UsageError
from icc.runtime.errors import MissingIsaError
from icc.runtime.format.isa import cpu_flags, select_library
from icc.runtime.format.load import read_manifest
from icc.runtime.format.manifest import Library
from icc.runtime.system import LINUX
from sizes import soak

MACHINE = 183  # EM_AARCH64 of elf.h
LIBRARIES = [
    Library(isa.name, f"kernels/{isa.name}.so", list(isa.cpu_flags)) for levels in LEVELS.values() for isa in levels
]


def products() -> Builder:
    program = Builder()
    add_linear_q(program, np.random.default_rng(0), 64, 33, "q4", 64, False)
    add_linear_q(program, np.random.default_rng(0), 64, 33, "q8", 64, False)
    return program


@pytest.fixture(scope="module")
def engine(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama for arm64, quantized."""
    folder = tmp_path_factory.mktemp("arm64")
    tiny.save_tiny(tiny.tiny_configs()["llama"], folder / "llama", dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "build_libraries", partial(build_libraries, optimize="-O1"))
        return icc.compile(folder / "llama", folder / "arm64.engine", target="arm64", quant="rtn4", max_seq_len=64)


def test_an_engine_has_its_levels_best_first(engine: Path) -> None:
    manifest = json.loads((engine / "engine.json").read_text())
    assert manifest["target"] == "arm64"
    libraries = manifest["programs"]["main"]["libraries"]
    assert [library["isa"] for library in libraries] == ["i8mm", "dotprod"]
    for library in libraries:
        content = (engine / library["path"]).read_bytes()
        assert struct.unpack_from("<H", content, 18)[0] == MACHINE
        command = ["readelf", "-W", "--dyn-syms", str(engine / library["path"])]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        symbols = set(re.findall(r"UND (\w+)", said))
        assert symbols and symbols <= toolchain.IMPORTS[LINUX], symbols


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="it runs there")
def test_this_machine_says_that_it_cannot_run_it(engine: Path) -> None:
    with pytest.raises(MissingIsaError, match=r"need asimddp atomics \(level dotprod\), have none"):
        icc.load(engine)
    done = subprocess.run(
        [sys.executable, str(engine), "run", "--ids", "5,6"], capture_output=True, text=True, check=False
    )
    assert done.returncode == MissingIsaError.exit_code and "Traceback" not in done.stderr
    assert "this machine cannot run the engine" in done.stderr


@pytest.mark.parametrize(
    ("flags", "more", "level"),
    [(1 << 8 | 1 << 20, 1 << 13, "i8mm"), (1 << 8 | 1 << 20, 0, "dotprod")],
    ids=["Graviton 3", "Graviton 2"],
)
def test_the_loader_takes_what_the_cpu_has(tmp_path: Path, flags: int, more: int, level: str) -> None:
    auxv = tmp_path / "auxv"
    auxv.write_bytes(struct.pack("<8Q", 16, flags, 6, 4096, 26, more, 0, 0))
    found = cpu_flags(auxv=auxv, machine="aarch64")
    assert select_library(LIBRARIES, found).isa == level
    with pytest.raises(MissingIsaError, match="need avx2 fma f16c"):  # an engine for x86
        select_library([library for library in LIBRARIES if library.isa == "avx2"], found)


def test_a_cpu_without_dot_products_is_refused(tmp_path: Path) -> None:
    auxv = tmp_path / "auxv"
    auxv.write_bytes(struct.pack("<4Q", 16, 1 << 8, 0, 0))  # Cortex-A72
    with pytest.raises(MissingIsaError, match="have atomics, missing asimddp"):
        select_library(LIBRARIES, cpu_flags(auxv=auxv, machine="aarch64"))
    assert not cpu_flags(auxv=tmp_path / "missing", machine="aarch64")


@cache
def loops(isa: Isa) -> dict[str, list[Counter[str]]]:
    """The instructions of each innermost loop by the name of its function, as clang writes them."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "a.cpp").write_text(emit_source(products().program(), isa))
        command = toolchain.compile_commands(isa, "a.cpp", "a.so", None, "-O3")[0]
        command = ["-S" if word == "-c" else "a.s" if word.endswith(".o") else word for word in command]
        subprocess.run(command, cwd=folder, check=True)
        text = (Path(folder) / "a.s").read_text()
    places: dict[str, int] = {}
    code: list[str] = []
    found: dict[str, list[Counter[str]]] = {}
    name, last = "", 0
    for line in text.splitlines():
        if label := re.match(r"([.\w]+):", line):
            places[label[1]] = len(code)
            name = label[1] if not label[1].startswith(".") else name
        elif instruction := re.match(r"\t([a-z][\w.]*)(?:\t(.*))?$", line):
            code.append(instruction[1])
            start = places.get((instruction[2] or "").split(", ")[-1], -1)
            if re.match("b|cb|tb", instruction[1]) and start >= last:  # a jump back, across no other jump
                found.setdefault(name, []).append(Counter(code[start:]))
                last = len(code)
    return found


def loop_of(isa: Isa, function: str, *instructions: str) -> Counter[str]:
    """The single innermost loop that has one of these instructions, in the function whose name matches the pattern."""
    some = [loop for name, inner in loops(isa).items() if re.search(function, name) for loop in inner]
    [found] = [loop for loop in some if loop.keys() & {*instructions}]
    return found


@pytest.mark.parametrize("isa", [I8MM, *soak(DOTPROD)], ids=lambda isa: isa.name)
def test_loops_multiply_by_its_instructions(isa: Isa) -> None:
    for rows, tiles in ((block.rows, block.tiles) for block in blocks_of(NIBBLES, isa, 64) if not block.matrix):
        four, eight = (loop_of(isa, f"quant_q{bits}_m{rows}_n{tiles}", "sdot", "usdot") for bits in (4, 8))
        assert four["sdot"] == 8 * rows * tiles  # for each 16 products
        assert eight["usdot" if isa == I8MM else "sdot"] == 4 * rows * tiles
        assert eight["usdot"] == 0 or isa == I8MM
        assert not four["ld1r"] and bool(eight["ld1r"]) == (rows == 1)  # a load for several k: sdot takes an element
        assert tiles > 1 or four["sdot"] + -(-2 * rows // 4) == lane_count(rows)
    assert loop_of(isa, "quant_q4_m1_n2", "sdot").total() <= 46  # for 128 bytes of weights
    assert loop_of(isa, "quant_q4_m4_n1", "sdot").total() <= 50  # of 64
    assert loop_of(isa, "quant_q8_m4_n1", "sdot", "usdot").total() <= 28  # for 64: bytes are multiplied once


def test_many_rows_are_multiplied_by_smmla() -> None:
    """32 products each, with few other instructions between them: as many as the choice of kernels counts."""
    blocks = blocks_of(NIBBLES, I8MM, 64)
    few, many = ([block for block in blocks if block.matrix == matrix] for matrix in (False, True))
    assert [block.rows for block in few] == [1, 2, 3, 4] and [block.rows for block in many] == [6, 8, 12, 16, 24]
    assert not any(block.matrix for block in blocks_of(NIBBLES, DOTPROD, 64))
    for rows in (block.rows for block in many):
        each = rows if rows <= 12 else 12 if rows == 24 else 8
        passes = rows // each * 2
        for bits, kind, instruction in ((4, "_Int8x16", "smmla"), (8, "_Uint8x16", "usmmla")):
            staged = loop_of(I8MM, f"quant_q{bits}_m{rows}_n1", "st2")
            block = loop_of(I8MM, f"matrix_block.*{kind}.*Li{each}E", instruction)
            assert staged["st2"] == 4 and not staged["sdot"] + staged["usdot"]
            assert block[instruction] == each * 4 // 2
            assert abs(3 * staged["st2"] + passes * block.total() - matrix_count(rows)) <= 4, rows


def test_vectors_of_256_bits_would_win_next_to_nothing_on_neoverse_v1() -> None:
    """Why no level has SVE: that CPU (Graviton 3) has four pipes for vectors of 128 bits, two of which make one of 256
    bits, and dispatches 8 operations per cycle, more than these loops need to keep the pipes busy. Pipes as LLVM's
    AArch64SchedNeoverseV1.td has them from Arm's Software Optimization Guide."""
    loop = loop_of(I8MM, "quant_q4_m1_n2", "sdot")
    vectors = sum(loop[name] for name in ("and", "ushr", "sdot"))
    neon, sve = vectors / 4, vectors / 2 / 2
    assert neon > loop.total() / 8 and sve == neon
    assert loop["ushr"] / 2 <= sve, "shifts have two of the four pipes, and one of the two"
    for each in (12, 8, 6):
        block = loop_of(I8MM, f"matrix_block.*_Int8x16.*Li{each}E", "smmla")
        loads = 2 * block["ldp"] + block["ldr"]
        assert block["smmla"] / 4 > max(block.total() / 8, loads / 3) - 0.5


def test_zig_compiles_it_whatever_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert toolchain.compile_commands(DOTPROD, "a.cpp", "a.so", None, "-O1")[0][:3] == [sys.executable, "-m", "ziglang"]
    monkeypatch.setattr(cxx, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match="ziglang is not installed") as error:
        build_libraries(products().program(), tmp_path / "kernels", [DOTPROD], optimize="-O1")
    assert "pip install ziglang" in str(error.value.hint)


def test_levels_of_x86_are_never_arm64s() -> None:
    assert LEVELS["x86-64"] == ALL and not {isa.name for isa in ALL} & {isa.name for isa in LEVELS["arm64"]}
    assert all(toolchain.ZIG_TARGETS[isa.system, isa.machine].startswith("aarch64") for isa in LEVELS["arm64"])


def test_one_engine_holds_libraries_for_both_kinds_of_cpu(engine: Path, tmp_path: Path) -> None:
    """Its program and weights are those for arm64, because layouts are the same. Each machine loads its own library."""
    model = engine.with_name("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "build_libraries", partial(build_libraries, optimize="-O1"))
        both = icc.compile(model, tmp_path / "e", target="cpu", isa="dotprod,avx2", quant="rtn4", max_seq_len=64)
    for name in ("program.json", "weights.safetensors", "kernels/dotprod.so"):
        assert (both / name).read_bytes() == (engine / name).read_bytes(), name
    manifest = read_manifest(both)
    assert manifest.target == "cpu"
    assert [library.isa for library in manifest.main.libraries] == ["avx2", "dotprod"]
    flags = {"avx2": {"avx2", "fma", "f16c", "avx512f"}, "dotprod": {"asimddp", "atomics", "i8mm"}}
    for level, of_cpu in flags.items():
        assert select_library(manifest.main.libraries, frozenset(of_cpu)).isa == level
    with pytest.raises(MissingIsaError, match=r"need asimddp atomics .*have atomics"):
        select_library(manifest.main.libraries, frozenset({"atomics"}))
    if os.uname().machine == "x86_64":
        with pytest.raises(MissingIsaError, match="need avx2 fma f16c"):  # an old CPU without asimddp
            select_library(manifest.main.libraries, frozenset())
        with icc.load(both) as llm:
            assert len(llm.generate([[5, 6]], icc.SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_levels_are_chosen_by_machine_or_by_name() -> None:
    assert find_isas("x86-64", None) == ALL and find_isas("arm64", None) == (I8MM, DOTPROD)
    assert find_isas("x86-64", "arm64, x86-64") == (*ALL, I8MM, DOTPROD)
    assert [isa.name for isa in find_isas("x86-64", "avx2,i8mm,avx512vnni")] == ["avx512vnni", "avx2", "i8mm"]
    with pytest.raises(UsageError, match="'neon' is unknown") as error:
        find_isas("x86-64", "avx2,neon")
    assert "arm64, amx, avx512vnni" in error.value.hint


def on_arm64(cpu: str, engine: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [ARM64_PYTHON, str(engine), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"CPU": cpu})


@needs_arm64
@pytest.mark.parametrize("quant", soak("rtn4", "none"))
def test_an_emulated_cpu_gives_the_tokens_of_x86(tmp_path: Path, quant: str) -> None:
    """The sample, on a CPU with i8mm and on one without; its prompt has rows enough for smmla."""
    model = Path(__file__).parents[2] / "samples" / "pystd"
    text = "def fib(n):\n    if n < 2:\n        return n\n"
    prompt = ["-p", text, "--max-tokens", "12", "--temperature", "0", "--threads", "2", "--json"]
    ours = icc.compile(model, tmp_path / "arm64", target="arm64", quant=quant, max_seq_len=256)
    with icc.load(icc.compile(model, tmp_path / "x86", target="native", quant=quant, max_seq_len=256)) as llm:
        params = icc.SamplingParams(max_tokens=12, temperature=0)
        expected = list(llm.generate([text], params)[0].token_ids)
    for cpu, level in (("max", "i8mm"), ("neoverse-n1", "dotprod")):
        done = on_arm64(cpu, ours, "run", *prompt)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["token_ids"] == expected
        said = on_arm64(cpu, ours, "inspect", "--json").stdout
        here = [library["isa"] for library in json.loads(said)["libraries"] if library["runs_here"]]
        assert here[0] == level


@needs_arm64
@pytest.mark.parametrize("vectors", ["sve256=on", *soak("sve=off", "sve512=on")])
def test_an_emulated_cpu_takes_neon_however_long_its_vectors_are(engine: Path, vectors: str) -> None:
    said = on_arm64(f"max,{vectors}", engine, "inspect", "--json")
    assert said.returncode == 0, said.stderr
    assert [one["isa"] for one in json.loads(said.stdout)["libraries"] if one["runs_here"]] == ["i8mm", "dotprod"]


@needs_arm64
def test_an_emulated_cpu_without_dot_products_says_so(engine: Path) -> None:
    done = on_arm64("cortex-a53", engine, "run", "--ids", "5,6")
    assert done.returncode == MissingIsaError.exit_code and "missing asimddp" in done.stderr
    assert "Traceback" not in done.stderr
