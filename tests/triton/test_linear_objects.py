"""The machine code of compiled products: causes of slowness on a device are visible in the disassembly.

Weights are fetched by asynchronous copies and multiplied by matrix instructions; codes become operands in registers by
shifts and masks, never by conversions; loops compute nothing twice; nothing spills.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from icc.compiler.backends.triton.dependent import dependent
from icc.compiler.backends.triton.kernels.linear import LinearKernel
from icc.compiler.backends.triton.objects.asked import AskedLoop
from icc.compiler.backends.triton.objects.asked import _loop_texts as loop_texts
from icc.compiler.backends.triton.objects.compile import Compiled, compile_specs, spec_key
from icc.compiler.backends.triton.objects.cubin import _GLOBAL, check_launch
from icc.compiler.backends.triton.objects.loops import (
    MatrixLoop,
    longest_loop,
    loop_faults,
    overwritten_registers,
)
from icc.compiler.backends.triton.objects.loops import _waits_each as waits_each
from icc.compiler.backends.triton.objects.sass import SassCode, disassemble
from icc.compiler.backends.triton.spec import LaunchSpec, Shape
from icc.compiler.backends.triton.tiling.choice import Config, Tuner
from icc.compiler.backends.triton.tiling.linear import ROWS, pick
from icc.compiler.ops.body import Body
from icc.compiler.program.steps.linear import Columns, Epilogue, Extra
from icc.compiler.targets import TARGETS
from interpreting import LIMITS, make_kernel
from products import Forced
from sizes import soak

# the products of Llama 8B: name, N, K, epilogue
GATE = Epilogue(Body.parse("t0 = silu a0; t1 = mul t0 a1"), (Columns(0, 1), Columns(14336, 1)), 14336)
ADD = Epilogue(Body.parse("t0 = add a0 a1"), (Columns(0, 1), Extra(1)), 4096)
SHAPES: dict[str, tuple[int, int, Epilogue | None]] = {
    "qkv": (6144, 4096, None), "o": (4096, 4096, ADD), "gate_up": (28672, 4096, GATE), "down": (4096, 14336, ADD),
}  # fmt: skip
ODD = {"qkv of gpt-oss": (5120, 2880, None)}  # K is 22.5 steps of 128
FORMATS = ("bf16", "q4g128", "q8g128", "e4m3", "e4m3_kg128", "nf4g64", "mxfp4a8")


def product(name: str, stored: str) -> LinearKernel:
    """One of the model's products, with its weight in the format `stored`."""
    n, k, epilogue = (SHAPES | ODD)[name]
    dense = stored == "bf16"
    extras = ["bf16"] * (epilogue is ADD)
    types = ("bf16", "bf16" if dense else "u8", "", *extras, "bf16")
    op = "linear" if dense else "linear_q"
    found = make_kernel(op, k=k, n=n, stored=stored, types=types, **({"epilogue": epilogue} if epilogue else {}))
    assert isinstance(found, LinearKernel)
    return found


def compiled(
    specs: list[LaunchSpec], target: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LaunchSpec, Compiled]]:
    monkeypatch.setenv("ICC_CACHE_DIR", str(folder))
    found = compile_specs(specs, TARGETS[target])
    return ((spec, found[spec_key(spec)]) for spec in specs)


def tile(name: str, stored: str, config: Config, target: str) -> LaunchSpec:
    return product(name, stored).launches(Shape(1024, False), LIMITS, Forced(config, target))[0]


def picked(name: str, stored: str, shape: Shape, target: str) -> LaunchSpec:
    """The main launch of a product as the target's cost model tiles it, without those before and after it."""
    launches = product(name, stored).launches(shape, LIMITS, Tuner(TARGETS[target]))
    entries = ("linear_tile", "linear_decode", "linear_w8a8", "linear_scaled")
    return next(spec for spec in launches if spec.entry in entries)


@pytest.mark.parametrize(("name", "rows", "parts"), [("gate_up", 128, 2), *soak(("o", 16, 1), ("down", 4096, 1))])
def test_scaled_products_for_b200(
    name: str, rows: int, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MXFP4 times MXFP8: matrix units apply the scales, copies are direct, nothing is converted. As in an engine,
    kernels wait for the previous kernel themselves, though they allocate tensor memory first."""
    spec = dependent(picked(name, "mxfp4a8", Shape(rows, False), "b200"))
    [(_, found)] = compiled([spec], "b200", tmp_path, monkeypatch)
    check_launch(spec_key(spec), found.binary, spec, found.entry)
    [loop] = found.loops
    assert (loop.instruction, loop.flops, loop.scaled) == ("UTCQMMA", 1.0, parts)
    assert loop_faults(found.entry, found.loops, 100) == () and found.spill_bytes == 0


def test_products_for_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        ("o", "q4g128", Shape(1, True), "HMMA"), ("gate_up", "q4g128", Shape(128, False), "HGMMA"),
        ("gate_up", "e4m3", Shape(128, False), "QGMMA"),
    ]  # fmt: skip
    specs = [picked(name, stored, shape, "h200") for name, stored, shape, _ in cases]
    for (_, found), (*_, matrix) in zip(compiled(specs, "h200", tmp_path, monkeypatch), cases, strict=True):
        [loop] = found.loops
        assert loop.instruction == matrix and loop.flops <= 1.0 and loop.copies > loop.narrow
        assert loop_faults(found.entry, found.loops) == () and found.spill_bytes == 0
        assert not loop.waits_each
        assert found.shared_bytes <= TARGETS["h200"].shared_memory_kib * 1024
        text = disassemble(found.binary)
        assert "LDGSTS" in text and text.count("I2F") < 4  # a division of addresses has one


# for 8-bit floats including the instructions that encode the row, which saves a kernel (1.3 and 1.4 without)
PER_WEIGHT = {"q4g128": 2.1, "q8g128": 3.2, "e4m3": 1.55, "e4m3_kg128": 1.65, "q4_0": 5.6, "q4_k": 8.0, "q6_k": 8.0,
              "q8_0": 8.0, "mxfp4": 8.0, "nf4g64": 15.0}  # fmt: skip
B200 = 1.04  # a factor: ptxas fuses two multiplications, and moves their operands (q4_0 371 instead of 351)


@pytest.mark.parametrize(
    ("stored", "target"),
    [("q4g128", "h200"), *soak(*((name, on) for on in ("h200", "h100", "b200") for name in PER_WEIGHT))],
)
def test_a_weight_of_a_decoded_row_costs_few_instructions(
    stored: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instructions of one lane, the whole loop counted. In float32 with tiles of 16 rows, q4_0 took 44, q4_k 72, nf4 97
    and mxfp4 102."""
    spec = picked("o", stored, Shape(1, True), target)
    config = pick(product("o", stored).product(1, TARGETS[target].level), Tuner(TARGETS[target]))
    [(_, found)] = compiled([spec], target, tmp_path, monkeypatch)
    weights = config["n"] * config["k"] / 32 / (1 if found.loops else config["warps"])
    assert spec.entry == "linear_decode" and found.spill_bytes == 0
    assert longest_loop(found.binary) / weights <= PER_WEIGHT[stored] * (B200 if target == "b200" else 1)


@pytest.mark.parametrize(("name", "rows"), [("down", 64), *soak(("qkv", 64), ("qkv", 128), ("o", 128), ("down", 512))])
def test_split_tiles_do_not_wait_for_each_instruction(
    name: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All programs run equally many steps, and the source states how many: if a loop's bounds are only known at run
    time, ptxas usually waits for each instruction (28 of 41 loops)."""
    spec = picked(name, "q4g128", Shape(rows, False), "h100")
    [(_, found)] = compiled([spec], "h100", tmp_path, monkeypatch)
    assert "tl.minimum(tl.program_id(1)" not in spec.source and "+ turn" in spec.source
    [loop] = found.loops
    assert (loop.instruction, loop.waits_each) == ("HGMMA", False)
    assert loop_faults(found.entry, found.loops, 90) == () and found.spill_bytes == 0


GROUP = """
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, R76, gdesc[UR16], R24, !UPT, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x{0} ;
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, R76, gdesc[UR20], R24, gsb0 ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x{1} ;
"""


@pytest.mark.parametrize(("waits", "each"), [((0, 0), True), ((0, 1), True), ((1, 0), False)])
def test_waits_are_read_from_the_machine_code(waits: tuple[int, int], each: bool) -> None:
    """The wait after the last instruction of a step is the one in the source."""
    assert waits_each(SassCode(GROUP.format(*waits)).lines) == each
    grouped = GROUP.replace("R24, !UPT, gsb0", "R24, !UPT").replace("WARPGROUP.DEPBAR.LE gsb0, 0x{0}", "NOP")
    assert not waits_each(SassCode(grouped.format(*waits)).lines)
    assert not waits_each(())
    slow = MatrixLoop("HGMMA", 1, 1.0, 2, 0, 0, 0, 0, 8, 0, each, 300)
    assert loop_faults("linear_tile", (slow,)) == (("waits for each HGMMA before the next",) if each else ())


@pytest.mark.parametrize(("name", "rows", "splits"), [("qkv", 32, 1), *soak(("gate_up", 64, 4), ("down", 32, 8))])
def test_values_of_blocks_wait_for_products_that_still_read_others(
    name: str, rows: int, splits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of one group of 128: its product still runs in the next step, whose values must not be written to the
    registers that it reads. For an 8B model in nf4, 86 tilings were refused for that, one by one."""
    config: Config = {"decode": 0, "m": rows, "n": 64, "k": 128, "warps": 4, "stages": 4, "splits": splits}
    spec = tile(name, "nf4g128", config, "h100")
    [(_, found)] = compiled([spec], "h100", tmp_path, monkeypatch)  # refuses operands that may be overwritten
    assert "scale_of(\n            settled(" in spec.source and found.loops[0].instruction == "HGMMA"
    assert "settled" not in tile(name, "nf4g128", config, "b200").source
    assert "settled" not in tile(name, "nf4g64", config, "h100").source


def test_split_values_of_blocks_do_not_wait_for_each_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If splits do not divide the steps of K, and K ends within a step, the number of iterations is still a constant.
    With bounds known only at run time, ptxas gave each instruction its own group, and waited for it."""
    config: Config = {"decode": 0, "m": 64, "n": 64, "k": 128, "warps": 4, "stages": 3, "splits": 4}
    spec = tile("qkv of gpt-oss", "mxfp4", config, "h100")
    [(_, found)] = compiled([spec], "h100", tmp_path, monkeypatch)
    assert loop_faults("linear_tile", found.loops) == () and found.loops[0].instruction == "HGMMA"


@pytest.mark.parametrize(
    ("stored", "target"),
    [("q4_k", "h100"), *soak(("q5_k", "h100"), ("q6_k", "h100"), ("q4_k", "a100"), ("q5_k", "a100"))],
)
def test_values_of_blocks_whose_scales_share_words_stay_in_registers(
    stored: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such values went through shared memory, in 8 rounds of store, barrier and load per step, when the shift that
    extracts a scale from its word was known only at run time."""
    [(_, found)] = compiled([picked("o", stored, Shape(64, False), target)], target, tmp_path, monkeypatch)
    [loop] = found.loops
    assert loop.barriers == 2 and not loop.shared_stores and not loop.conversions and not found.spill_bytes


@pytest.mark.parametrize("target", ["a100", "l40s", "h100", "b200"])
def test_no_warps_make_the_same_values_of_blocks(target: str) -> None:
    """Four warps over 32 columns computed every value 2.00 times, in steps of 655 instructions; over 64 columns a step
    has 566."""
    tiles = [c for c in _candidates("o", "mxfp4", target, 16) if not c["decode"] and not c.get("unpacked")]
    assert tiles and all(c["n"] >= 16 * c["warps"] for c in tiles)


def test_warps_that_compute_the_same_rows_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier tiling of gate and up for 128 rows: 8 warps over 64 columns."""
    bad: Config = {"decode": 0, "m": 128, "n": 64, "k": 128, "warps": 8, "stages": 3, "splits": 1}
    [(_, found)] = compiled([tile("gate_up", "q4g128", bad, "h100")], "h100", tmp_path, monkeypatch)
    assert loop_faults("linear_tile", found.loops) == (
        "computes 1.75 times what it multiplies", "2 conversions of layouts per step",
        "32 stores to shared memory per step", "33 barriers per step",
    )  # fmt: skip
    assert bad not in _candidates("gate_up", "q4g128", "h100", 128)


def _candidates(name: str, stored: str, target: str, rows: int) -> list[Config]:
    """All candidate tilings."""
    seen: list[Config] = []

    class Recorder(Tuner):
        def pick(self, key: str, candidates: Any, cost: Any) -> Config:
            seen.extend(candidates)
            return candidates[0]

    product(name, stored).launches(Shape(rows, False), LIMITS, Recorder(TARGETS[target]))
    return seen


def test_a_clean_loop_has_no_faults() -> None:
    fine = MatrixLoop("HGMMA", 2, 1.0, 4, 0, 0, 0, 0, 8, 1, False, 300)
    assert loop_faults("linear_tile", (fine,)) == ()
    spilling = MatrixLoop("HMMA", 1, 1.0, 9, 7, 3, 1, 4, 8, 0, False, 300)
    assert loop_faults("attention", (spilling,)) == ("3 accesses of local memory per step",)
    small = MatrixLoop("HGMMA", 1, 1.0, 2, 0, 0, 0, 0, 8, 5, False, 300)
    assert loop_faults("linear_tile", (small,)) == ("5 of 8 copies of fewer than 16 bytes",)


@pytest.mark.parametrize(("level", "right"), [(80, "HMMA"), (90, "HGMMA"), (90, "QGMMA"), (100, "UTCHMMA")])
def test_large_products_run_on_the_largest_instructions(level: int, right: str) -> None:
    def loop(instruction: str, tile: tuple[int, int]) -> MatrixLoop:
        return MatrixLoop(instruction, 1, 1.0, 2, 0, 0, 0, 0, 8, 0, False, 300, tile)

    assert loop_faults("attention", (loop(right, (64, 128)), loop("HMMA", (128, 32))), level) == ()
    wrong = loop_faults("attention", (loop("HMMA", (64, 128)),), level)
    assert wrong == (() if level == 80 else ("products of 64 x 128 by HMMA",))


DOT = "%{0} = ttng.warp_group_dot %a, %b, %c : !ttg.memdesc<64x32xbf16, #s> * !ttg.memdesc<32x{0}xbf16, #s> -> tensor"


def test_what_loops_ask_for_is_told_apart_from_what_is_in_loops_within_them() -> None:
    outer = ["  scf.for %i = %c0_i32 to %n step %c1_i32 {", "    " + DOT.format(16), "  }"]
    inner = ["    %0 = scf.while (%x = %y) : (i32) -> i32 {", "    } do {", "      " + DOT.format(8), "    }"]
    unrolled = ["  scf.for %i = %c2_i32 to %c9_i32 step %c3_i32 {", "    " + DOT.format(128), "  }"]
    texts = list(loop_texts("\n".join([*outer[:2], *inner, outer[2], *unrolled])))
    asked = [AskedLoop(text, trips) for text, trips in texts]
    assert [(a.tile, a.flops, a.trips) for a in asked] == [
        ((64, 16), 2 * 64 * 32 * 16, 0), ((64, 8), 2 * 64 * 32 * 8, 0), ((64, 128), 2 * 64 * 32 * 128, 3),
    ]  # fmt: skip
    text = "\n".join(unrolled)
    assert AskedLoop.whole(asked[2:], text, left=0).flops == 3 * asked[2].flops
    assert AskedLoop.whole(asked, text, left=0).flops == AskedLoop.whole(asked[2:], text, left=1).flops == float("inf")


# Codes of two fields fill the registers of tiles that compute nothing twice, and need two more writes to tensor memory;
# the scales of groups of 64 and 32 are copied in words of 4 bytes, which in tiles of few rows are most copies.
KNOWN = {
    **{("q8g128", target): "computes 2.00 times|copies of fewer" for target in ("a100", "l40s")},
    ("q8g128", "b200"): "6 barriers",
    **{("nf4g64", target): "copies of fewer" for target in ("a100", "l40s", "h100", "b200")},
    **{("mxfp4a8", target): "copies of fewer" for target in ("a100", "l40s", "h100")},
}  # fmt: skip


@pytest.mark.parametrize("target", soak("a100", "l40s", "h100", "b200"))
@pytest.mark.parametrize("stored", FORMATS)
def test_every_picked_tiling_is_clean(
    target: str, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All products for all classes of row counts have no faults, except the known ones of formats."""
    known = re.compile(KNOWN.get((stored, target), "(?!)"))
    specs = {}
    for name in SHAPES:
        for rows in ROWS:
            for spec in product(name, stored).launches(Shape(rows, rows <= 256), LIMITS, Tuner(TARGETS[target])):
                specs[spec_key(spec)] = spec
    found = {}
    for spec, made in compiled(list(specs.values()), target, tmp_path, monkeypatch):
        if faults := [fault for fault in loop_faults(spec.entry, made.loops) if not known.search(fault)]:
            found[spec_key(spec)] = faults
    assert not found


RUNNING = """
.text.kernel:
.L_x_0:
        /*0010*/                   LOP3.LUT R76, R5, 0xf, RZ, 0xc0, !PT ;
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, R76, gdesc[UR16], R24, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   LDS.128 R84, [R3] ;
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, R84, gdesc[UR16], R24, gsb0 ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0080*/              @P4 BRA `(.L_x_0) ;
        /*0090*/                   EXIT ;
"""


def test_operands_that_matrix_units_still_read_are_not_written() -> None:
    """Triton 3.6 and 3.7 compile a loop over codes so that the second product of a step runs while the next step
    begins. Its operands, R84 to R87, are overwritten when only the first product of that step has been waited for."""
    assert overwritten_registers(RUNNING) == set()
    late = RUNNING.replace("R5, 0xf", "R84, 0xf").replace("LOP3.LUT R76", "LOP3.LUT R85")
    assert overwritten_registers(late) == {85}
    waits = late.replace(".L_x_0:\n", ".L_x_0:\n        /*0000*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n")
    assert overwritten_registers(waits) == set()


TAKES_TENSOR_MEMORY = """
.text.kernel:
        /*0000*/              @P1 BRA `(.L_x_0) ;
        /*0010*/                   UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR6, UR6 ;
        /*0020*/                   STS [UR4], R0 ;
.L_x_0:
        /*0030*/                   ACQBULK ;
        /*0040*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*0050*/                   EXIT ;
"""


def test_a_kernel_that_takes_tensor_memory_waits_behind_that() -> None:
    """A wait is on every path to global memory, and to the kernel's end."""

    def waits(text: str) -> bool:
        return SassCode(text).always_behind("ACQBULK", _GLOBAL)

    assert waits(TAKES_TENSOR_MEMORY)
    for wrong in ("STG.E desc[UR4][R2.64], R0", "LDGSTS.E [R1], desc[UR4][R2.64]", "EXIT"):
        assert not waits(TAKES_TENSOR_MEMORY.replace("STS [UR4], R0", wrong))
    assert not waits(TAKES_TENSOR_MEMORY.replace("     ACQBULK", "@P0 ACQBULK"))
    assert not waits(TAKES_TENSOR_MEMORY.replace("ACQBULK", "NOP"))
    passed = TAKES_TENSOR_MEMORY.replace("(.L_x_0)", "(.L_x_1)").replace("        /*0040", ".L_x_1:\n        /*0040")
    assert not waits(passed)
