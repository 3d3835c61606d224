"""AMX: products of many rows by tiles, bit-equal to products by vectors, and the ISA level that has them.

Machines without it run the level's kernels with a model of the tile instructions in C.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from cpu_cases import add_linear_q
from cpu_harness import Builder, Runner, flat_batch
from cpu_levels import runnable_amx
from cpu_program import all_ops, feeds_of, keep
from icc.compiler.backends.cpu.build import build_libraries
from icc.compiler.backends.cpu.isa import ALL, AMX, AVX2, AVX512VNNI, Isa
from icc.compiler.backends.cpu.kernels import amx, linear
from icc.compiler.backends.cpu.layouts.affine import BYTES, NIBBLES
from icc.compiler.backends.cpu.layouts.block_reader import reader_of
from icc.compiler.backends.cpu.layouts.reduced import SIGNED
from icc.compiler.backends.cpu.layouts.split import BOTH
from icc.compiler.weights.formats.registry import find_format
from icc.runtime.errors import MissingIsaError
from icc.runtime.format import isa as levels
from icc.runtime.format.isa import cpu_flags, select_library
from icc.runtime.format.manifest import Library

HAS_IT = " ".join(AMX.cpu_flags)
LIBRARIES = [Library(isa.name, f"kernels/{isa.name}.so", list(isa.cpu_flags)) for isa in ALL]


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> tuple[Builder, dict[str, Path]]:
    """All products of codes, at odd shapes, in groups of 16 to 128: by tiles, except for one row, and on AVX2. Returns
    the program and its libraries by level."""
    program, folder = all_ops(), tmp_path_factory.mktemp("amx")
    keep(program, r"(quantize_)?(linear|experts)_(q4|q8|q8s|i7)_.*")
    isas = [replace(isa, quant_blocks=isa.quant_blocks[:1]) for isa in (runnable_amx(), AVX2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amx, "matrix_cycles", lambda *_: 0.0)
        built = build_libraries(program.program(), folder / "kernels", isas, optimize="-O1")
    return program, {library.isa: folder / library.path for library in built}


@pytest.mark.parametrize(
    ("tokens", "threads"), [(1, 1), (7, 1), (17, 2), (35, 2), (77, 1)]
)  # a thread's own rows, of 77
def test_products_by_tiles_have_the_bits_of_avx2(
    products: tuple[Builder, dict[str, Path]], tokens: int, threads: int
) -> None:
    program, libraries = products
    batch, arrays = flat_batch(tokens), []
    for path in libraries.values():
        runner = Runner(path, program, threads, 80)
        arrays.append(runner.step(batch, feeds_of(program, batch)))
        runner.close()
    names = [f"{case.name}.y" for case in program.cases if not case.name.startswith("quantize")]
    assert len(names) >= 18 and {re.sub(r"_.*", "", name) for name in names} == {"linear", "experts"}
    for name in names:
        assert np.any(arrays[0][name]) and np.array_equal(*(found[name].view(np.uint8) for found in arrays)), name


def test_all_layouts_have_kernels_by_tiles(products: tuple[Builder, dict[str, Path]]) -> None:
    source = products[1]["amx"].with_suffix(".cpp").read_text()
    for table in ("q4", "q8", "q8s", "i7"):
        assert re.findall(rf"quant_{table}_m(?:16|32)_n2 }}", source) == [f"quant_{table}_m{m}_n2 }}" for m in (16, 32)]
    assert source.count("TilesInUse use(") == len(
        re.findall(r"        gemm_quant\(QUANT|    gemm_quant\(QUANT", source)
    )


def test_the_model_traps_where_the_processor_would(tmp_path: Path) -> None:
    """Without a tile configuration, and if shapes do not fit."""
    header = Path(__file__).parents[1] / "amx_model.h"
    source = tmp_path / "traps.c"
    source.write_text(
        """int main(int argc, char** argv) {
    uint8_t shape[64] = {1};
    for (int t = 0; t < 3; ++t) shape[16 + 2 * t] = 64, shape[48 + t] = 16;
    if (argc == 3) shape[48 + 2] = 8;
    if (argc > 1) _tile_loadconfig(shape);
    _tile_dpbsud(0, 1, 2);
    return 0;
}"""
    )
    subprocess.run(
        ["g++", "-x", "c++", "-include", str(header), str(source), "-o", str(tmp_path / "traps")], check=True
    )
    codes = [subprocess.run([tmp_path / "traps", *given], check=False).returncode for given in ([], ["a"], ["a", "b"])]
    assert codes[1] == 0 and codes[0] < 0 and codes[2] < 0


def loop_by_tiles(isa: Isa, fmt: str, folder: Path, rows: int) -> tuple[list[str], str]:
    """The instructions of a group's kernel from clearing sums to storing them, and the disassembly of the library."""
    program = Builder()
    add_linear_q(program, np.random.default_rng(0), 64, 33, fmt, 64, False)
    [built] = build_libraries(program.program(), folder / "kernels", [isa])
    command = ["objdump", "-d", "--no-show-raw-insn", str(folder / built.path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^ +[0-9a-f]+:\s+(\S.*)$", text, re.MULTILINE)
    zeros = [n for n, line in enumerate(lines) if line.startswith("tilezero %tmm0")]
    begin = zeros[rows // 16 - 1]
    end = next(n for n in range(begin, len(lines)) if lines[n].startswith("tilestored") and "%tmm0" in lines[n])
    return lines[begin:end], text


@pytest.mark.parametrize(("fmt", "compiler"), [("q4", ""), ("q8", ""), ("q4", "zig")])
def test_loops_multiply_by_tiles_and_keep_their_sums_there(
    fmt: str, compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    loop, text = loop_by_tiles(AMX, fmt, tmp_path, 32)
    tiles = [line.split()[0] for line in loop if "tmm" in line]
    assert tiles[:4] == ["tilezero"] * 4 and tiles[4:] == [
        "tileloadd", "tileloadd", "tileloadd", "tdpbsud", "tdpbsud", "tileloadd", "tdpbsud", "tdpbsud",
    ]  # fmt: skip
    assert not re.search("tileloadd.*tmm[0-3]", text)  # sums that were stored are never loaded
    stored = [line for line in loop if re.match(r"vmovdq\w+ +%zmm", line)]
    assert bool(stored) == (fmt == "q4")  # lines of bytes go from the weights to tiles
    assert text.count("ldtilecfg") == text.count("tilerelease") == 1


READERS = {"q4": NIBBLES, "q8": BYTES, "q8s": BOTH, "i7": SIGNED, "q4_0": reader_of(find_format("q4_0"))}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("group", [16, 32, 64, 128, 512])
def test_each_number_of_rows_takes_what_the_model_says_is_cheaper(name: str, group: int) -> None:
    reader = READERS[name]
    blocks = linear.blocks_of(reader, AMX, group)
    vectors = [block for block in AMX.quant_blocks if block in linear.blocks_of(reader, AVX512VNNI, group)]
    by_tiles = [block for block in blocks if block in AMX.tile_blocks]
    assert [block.rows for block in blocks] == sorted(block.rows for block in blocks)
    assert by_tiles == list(AMX.tile_blocks) if by_tiles else blocks == tuple(vectors)
    tiles = amx.matrix_cycles(reader, AMX.tile_blocks[0], group)
    for rows in range(linear.SCREENED_ROWS + 1, 17) if by_tiles else ():
        taken = next(block for block in blocks if block.rows >= rows)
        other = next((amx.vector_cycles(reader, b.rows, group) for b in vectors if b.rows >= rows), None)
        assert taken in by_tiles if other is None else (taken in by_tiles) == (other >= tiles), rows
    assert all(block in blocks for block in vectors if block.rows <= linear.SCREENED_ROWS)


def test_more_of_a_row_per_scale_gives_tiles_more_to_do() -> None:
    """The number of rows from which tiles win, by group, and the cycles of a 4-bit prompt relative to vectors."""

    def least(group: int) -> int | None:
        blocks = linear.blocks_of(NIBBLES, AMX, group)
        return next((a.rows + 1 for a, b in pairwise(blocks) if b in AMX.tile_blocks), None)

    assert [least(group) for group in (16, 32, 64, 128)] == [None, 13, 9, 7]
    times = [
        2 * amx.vector_cycles(NIBBLES, 16, group) / amx.matrix_cycles(NIBBLES, AMX.tile_blocks[1], group)
        for group in (32, 64, 128)
    ]
    assert [round(t, 1) for t in times] == [1.7, 2.7, 4.3]


@pytest.mark.parametrize(
    ("flags", "allowed", "level"),
    [
        (HAS_IT, True, "amx"),
        (HAS_IT, False, "avx512vnni"),
        (HAS_IT.replace("amx_int8", ""), True, "avx512vnni"),
        ("fpu avx2 fma f16c avx_vnni", True, "avxvnni"),
    ],
)
def test_the_loader_takes_it_where_the_system_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, allowed: bool, level: str
) -> None:
    asked = list[bool]()
    monkeypatch.setattr(levels, "_tiles_allowed", lambda: bool(asked.append(True)) or allowed)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    found = cpu_flags(cpuinfo, machine="x86-64")
    assert select_library(LIBRARIES, found).isa == level
    assert bool(asked) == (flags == HAS_IT)  # no permission is requested if the CPU lacks AMX
    if not allowed:
        with pytest.raises(MissingIsaError, match="level amx needs tile data of AMX, which the system refuses"):
            select_library(LIBRARIES, found, "amx")


@pytest.mark.parametrize("answer", [0, -1])
def test_the_system_is_asked_once(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    calls = list[tuple[int, ...]]()

    class Libc:
        def __init__(self, name: None) -> None:
            pass

        def syscall(self, *arguments: int) -> int:
            calls.append(arguments)
            return answer

    monkeypatch.setattr(levels.ctypes, "CDLL", Libc)
    monkeypatch.setattr(levels, "machine", lambda: "x86-64")
    levels._tiles_allowed.cache_clear()
    try:
        assert [levels.can_run(["amx_tile"], frozenset(["amx_tile"])) for _ in range(2)] == [answer == 0] * 2
    finally:
        levels._tiles_allowed.cache_clear()
    assert calls == [(158, 0x1023, 18)]  # arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
