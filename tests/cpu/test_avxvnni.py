"""AVX-VNNI: its instructions are in the loops, and its kernels are bit-equal to AVX2's.

Machines without it run the level's kernels with the same instructions in AVX-512's encoding, or with a model of them in
C.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cpu_attention import LENGTHS, MIXED, SHAPES, build_model, play
from cpu_cases import add_linear_q
from cpu_harness import Builder, Runner, flat_batch
from cpu_levels import TWIN, runnable_avxvnni
from cpu_program import feeds_of
from icc.compiler.backends.cpu.build import build_libraries
from icc.compiler.backends.cpu.isa import ALL, AVX2, AVXVNNI, Isa
from icc.runtime.format.isa import cpu_flags, select_library
from icc.runtime.format.manifest import Library

MULTIPLY = ("vpdpbusd", "vpmaddubsw")  # AVX-VNNI's, AVX2's


@pytest.fixture(scope="module")
def library(ops_program: Builder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("avxvnni")
    [built] = build_libraries(ops_program.program(), folder / "kernels", [runnable_avxvnni()], optimize="-O1")
    return folder / built.path


@pytest.mark.parametrize("tokens", [1, 17])
def test_every_op_is_right_and_products_have_the_bits_of_avx2(
    ops_program: Builder, ops_libraries: dict[str, Path], library: Path, tokens: int
) -> None:
    batch, arrays = flat_batch(tokens), []
    for path in (library, ops_libraries["avx2"]):
        runner = Runner(path, ops_program, 2)
        arrays.append({**batch.arrays(), **runner.step(batch, feeds_of(ops_program, batch))})
        runner.close()
    for case in ops_program.cases:
        for output, expected in case.expect(arrays[0]).items():
            got, finite = arrays[0][output].astype(np.float64), np.isfinite(expected)
            assert np.array_equal(got[~finite], expected[~finite]), case.name
            limit = case.tolerance * max(1.0, np.abs(expected[finite]).max(initial=0))
            assert np.abs(got[finite] - expected[finite]).max(initial=0) <= limit, case.name
    products = [f"{case.name}.y" for case in ops_program.cases if case.name.startswith(("linear", "experts"))]
    assert len(products) > 20
    for name in products:
        assert np.array_equal(*(found[name].view(np.uint8) for found in arrays)), name


def test_attention_over_a_cache_of_int8_has_the_bits_of_avx2(tmp_path: Path) -> None:
    model = build_model("i8", 16, SHAPES[:1])
    outputs = []
    for isa in (runnable_avxvnni(), AVX2):
        [built] = build_libraries(model.builder.program(), tmp_path / isa.name / "kernels", [isa], optimize="-O1")
        runner = Runner(tmp_path / isa.name / built.path, model.builder, 2, 160, num_blocks=60)
        outputs.append(play(runner, LENGTHS, MIXED)[1])
        runner.close()
    for ours, theirs in zip(*outputs, strict=True):
        assert all(np.any(ours[name]) and np.array_equal(ours[name], theirs[name]) for name in ours)


def four_bits(isa: Isa, folder: Path, optimize: str = "-O3") -> str:
    """The disassembly of a program that only multiplies with 4-bit weights."""
    program = Builder()
    add_linear_q(program, np.random.default_rng(0), 64, 33, "q4", 64, False)
    [built] = build_libraries(program.program(), folder / "kernels", [isa], optimize=optimize)
    command = ["objdump", "-d", "--no-show-raw-insn", str(folder / built.path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loops(disassembly: str) -> list[list[str]]:
    """The instructions of each innermost loop: from the target of a backward jump to the jump."""
    lines = re.findall(r"^ +([0-9a-f]+):\s+(\S.*)$", disassembly, re.MULTILINE)
    place = {int(at, 16): number for number, (at, _) in enumerate(lines)}
    jumps = [(n, re.match(r"j\w+\s+([0-9a-f]+)\b", text)) for n, (_, text) in enumerate(lines)]
    spans = [(place[int(to[1], 16)], n) for n, to in jumps if to and place.get(int(to[1], 16), n + 1) <= n]
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [[text for _, text in lines[begin : end + 1]] for begin, end in inner]


def test_loops_multiply_by_its_instruction_and_copy_no_sums(tmp_path: Path) -> None:
    found = four_bits(AVXVNNI, tmp_path)
    assert MULTIPLY[1] not in found
    kernels = [loop for loop in loops(found) if any(MULTIPLY[0] in text for text in loop)]
    assert len(kernels) == len(AVXVNNI.quant_blocks)
    for loop in kernels:
        products = [text for text in loop if MULTIPLY[0] in text]
        assert all(text.startswith("{vex} ") for text in products), products  # the CPUs know no other encoding
        assert sum("vpmadd" in text or "vpadd" in text for text in loop) == 0
    [one_row] = [loop for loop in kernels if len([t for t in loop if "prefetch" in t]) == 4]
    assert len(one_row) <= 66  # for the 256 bytes of four lines, where AVX2 has 104


def test_the_twin_has_the_instruction_as_avx512_encodes_it(tmp_path: Path) -> None:
    found = re.findall(r"(?:\{vex\} )?vpdpbusd .*", four_bits(TWIN, tmp_path, "-O1"))
    assert found and all("ymm" in text and "{vex}" not in text for text in found)


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (
            "fpu avx avx2 fma f16c avx_vnni",
            "avxvnni",
        ),  # Alder Lake; Lunar Lake, whose AVX-VNNI-INT8 Linux does not list
        ("fpu avx avx2 fma f16c", "avx2"),
        ("fpu avx2 fma f16c avx512f avx512bw avx512vl avx512dq", "avx512"),
        ("fpu avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx_vnni", "avx512vnni"),  # Zen 5
        # Granite Rapids: Linux has no flag AVX10, which adds nothing to AVX-512's flags; here without AMX
        ("avx avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx_vnni avx512_fp16", "avx512vnni"),
    ],
)
def test_the_loader_takes_it_where_the_cpu_says_so(tmp_path: Path, flags: str, level: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: spectre_v1\n")
    libraries = [Library(isa.name, f"kernels/{isa.name}.so", list(isa.cpu_flags)) for isa in ALL]
    assert select_library(libraries, cpu_flags(cpuinfo)).isa == level
