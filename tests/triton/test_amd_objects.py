"""The loops of AMD kernels, read from their machine code: MFMA with waves of 64, WMMA with waves of 32."""

from __future__ import annotations

from pathlib import Path

import pytest
from icc.compiler.backends.errors import KernelRefused
from icc.compiler.backends.triton.arrived import arrived
from icc.compiler.backends.triton.objects.amdgcn import matrix_loops
from icc.compiler.backends.triton.objects.compile import compile_specs
from icc.compiler.backends.triton.objects.loops import loop_faults
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Config, Tuner
from icc.compiler.backends.triton.tiling.linear import pick
from icc.compiler.targets import TARGETS
from sizes import usual
from test_linear_objects import LIMITS, Forced, product

TILE: Config = {"decode": 0, "m": 64, "n": 64, "k": 128, "warps": 4, "stages": 2, "splits": 1}
DECODE: Config = {"decode": 1, "m": 16, "n": 16, "k": 128, "warps": 4, "stages": 2, "splits": 1}
CASES = [
    (target, stored, tiling)
    for target in ("mi300x", "mi355x", "rx7900xtx", "rx9070xt")
    for stored in ("bf16", "q4g128")
    for tiling in ("tile", "decode")
]
OFTEN = [("mi300x", "q4g128", "tile"), ("rx7900xtx", "bf16", "decode"), ("rx9070xt", "q4g128", "decode")]


@pytest.mark.parametrize(("target", "stored", "tiling"), usual(CASES, *(case for case in CASES if case not in OFTEN)))
def test_matrix_instructions_do_what_is_asked(
    target: str, stored: str, tiling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ICC_CACHE_DIR", str(tmp_path))
    found, decode = TARGETS[target], tiling == "decode"
    config = {**(DECODE if decode else TILE), "k": 64 if stored == "bf16" else 128}
    [spec] = product("o", stored).launches(Shape(1 if decode else 64, decode), LIMITS, Forced(config, target))
    [compiled] = compile_specs([arrived(spec, found)], found).values()
    [loop] = compiled.loops
    assert loop.instruction == ("WMMA" if found.rdna else "MFMA")
    assert loop.flops == 1 and loop.local == 0 and loop.barriers == 2 * loop.steps
    assert not loop_faults(spec.entry, compiled.loops)
    assert compiled.shared_bytes <= found.shared_memory_kib * 1024
    assert compiled.spill_bytes == 0 or not decode


TTGIR = """
  scf.for %i = %c0_i32 to %n step %c1_i32 {
    %a = tt.dot %x, %w, %acc : tensor<16x32xTYPE, #a> * tensor<32x16xTYPE, #b> -> tensor<16x16xf32, #c>
  }
"""
LOOP = """
.LBB0_1:                                ; %entry
	global_load_b128 v[0:3], v4, s[0:1]
.LBB0_2:                                ; =>This Inner Loop Header: Depth=1
	s_barrier
	global_load_b128 v[0:3], v4, s[0:1]
	v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[16:23], v[0:7]
	s_cbranch_scc0 .LBB0_4
; %bb.3:                                ;   in Loop: Header=BB0_2 Depth=1
	v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[16:23], v[0:7] ; a comment
	scratch_load_b32 v1, off
	global_load_b32 v2, v4, s[0:1]
	global_load_u16 v2, v4, s[0:1]
	s_barrier
	s_branch .LBB0_2
.LBB0_4:
	s_barrier
"""


def test_what_a_loop_does_is_counted() -> None:
    [loop] = matrix_loops(LOOP, TTGIR.replace("TYPE", "bf16"), 1)
    assert (loop.steps, loop.flops, loop.barriers, loop.local, loop.copies, loop.narrow) == (1, 1.0, 2, 1, 3, 2)
    assert loop_faults("linear_tile", [loop]) == (
        "1 accesses of local memory per step",
        "2 of 3 copies of fewer than 16 bytes",
    )
    [twice] = matrix_loops(LOOP, TTGIR.replace("TYPE", "bf16"), 2)  # two warps for the product of one
    assert loop_faults("attention", [twice])[0] == "computes 2.00 times what it multiplies"
    assert matrix_loops(LOOP, "", 1) == ()


def test_products_without_matrix_instructions_are_refused() -> None:
    plain = LOOP.replace("v_wmma_f32_16x16x16_bf16", "v_fma_f32")
    with pytest.raises(KernelRefused, match="without matrix instructions"):
        matrix_loops(plain, TTGIR.replace("TYPE", "bf16"), 1)
    assert matrix_loops(plain, TTGIR.replace("TYPE", "f32"), 1) == ()


@pytest.mark.parametrize("target", ["rx7900xtx", "rx9070xt"])
def test_no_warp_repeats_what_another_does(target: str) -> None:
    """A warp multiplies 16 x 16 values at once: a tile of 16 rows and 32 columns has work for two warps."""
    for stored in ("bf16", "q4g128", "q8g128"):
        for rows in (1, 16, 64, 512):
            kernel = product("gate_up", stored)
            config = pick(kernel.product(rows, 0), Tuner(TARGETS[target]))
            assert config["decode"] or config["m"] * config["n"] >= 256 * config["warps"], (stored, rows, config)
