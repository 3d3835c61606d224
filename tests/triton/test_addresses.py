"""Proofs that a kernel's accesses lie in its buffers and that no index exceeds 32 bits, on Triton's printed IR.

Every compile for a GPU proves this for its kernels (tests/engine/test_gpu_targets.py); here are planted faults.
"""

from __future__ import annotations

import numpy as np
import pytest
from icc.compiler.backends.triton.bounds.addresses import address_faults
from icc.compiler.backends.triton.bounds.forms import Form, UnknownInteger, lower, upper
from icc.compiler.backends.triton.bounds.ttir import TtirType, parse
from icc.compiler.backends.triton.bounds.values import Memory, Samples

ROWS = """module {{
  tt.func public @rows(%arg0: !tt.ptr<f32> {{tt.divisibility = 16 : i32}}, %arg1: i32, %arg2: !tt.ptr<i32>) {{
    %cst = arith.constant dense<0.000000e+00> : tensor<64xf32>
    %width = arith.constant dense<{columns}> : tensor<64xi32>
    %stride = arith.constant dense<{stride}> : tensor<64x{kind}>
    %c64_i32 = arith.constant 64 : i32
    %c0_i32 = arith.constant 0 : i32
    %c1_i32 = arith.constant 1 : i32
    %0 = tt.get_program_id x : i32
    %1 = arith.muli %0, %c64_i32 : i32
    %2 = tt.make_range {{end = 64 : i32, start = 0 : i32}} : tensor<64xi32>
    %3 = tt.splat %1 : i32 -> tensor<64xi32>
    %4 = arith.addi %3, %2 : tensor<64xi32>
    %5 = tt.splat %arg1 : i32 -> tensor<64xi32>
    %6 = arith.cmpi {compared}, %4, %5 : tensor<64xi32>
    %7 = arith.extsi %4 : tensor<64xi32> to tensor<64xi64>
    %8 = arith.muli {row}, %stride : tensor<64x{kind}>
    %9 = tt.splat %arg0 : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
    %10 = tt.addptr %9, %8 : tensor<64x!tt.ptr<f32>>, tensor<64x{kind}>
    {body}
    tt.return
  }}
}}"""
LAST = "%11 = tt.load %10, %6, %cst : tensor<64x!tt.ptr<f32>>"
PAGES = """%12 = tt.load %arg2 : !tt.ptr<i32>
    %13 = tt.splat %12 : i32 -> tensor<64xi32>
    %14 = arith.muli %13, %width : tensor<64xi32>
    %15 = tt.addptr %9, %14 : tensor<64x!tt.ptr<f32>>, tensor<64xi32>
    %16 = tt.load %15, %6, %cst : tensor<64x!tt.ptr<f32>>"""
OTHER = "%other = arith.constant dense<1.000000e+00> : tensor<64xf32>"
COUNTED = """%20 = scf.for %arg9 = %c0_i32 to %arg1 step %c1_i32 iter_args(%arg10 = %c0_i32) -> (i32)  : i32 {
      %21 = tt.addptr %arg2, %arg10 : !tt.ptr<i32>, i32
      %22 = tt.load %21 : !tt.ptr<i32>
      scf.yield %22 : i32
    }"""


def faults(
    rows: int, stride: int, *, kind: str = "i64", compared: str = "slt", body: str = LAST, columns: int = 1,
    nbytes: int = 0, numbers: tuple[int, int] | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """The faults found in a kernel that reads an element of each row of a table, in whole blocks of 64 rows."""
    row = "%4" if kind == "i32" else "%7"
    text = ROWS.format(stride=stride, kind=kind, compared=compared, row=row, body=body, columns=columns)
    place = np.arange(-(-rows // 64), dtype=np.int64)
    zero = place * 0
    memory = {0: Memory(nbytes or 4 * (rows - 1) * stride + 4), 2: Memory(4, *(numbers or ()))}
    return address_faults(parse(text), memory, Samples((place, zero, zero), (len(place), 1, 1), {1: rows}))


def test_a_kernel_that_minds_its_rows_has_no_faults() -> None:
    for rows in (1, 64, 100, 8192):
        assert faults(rows, 128) == ()


def test_the_logits_of_a_large_vocabulary_leave_32_bits() -> None:
    """A row of 256,000 logits, 16,384 of them: 2^31.97 elements."""
    assert faults(16384, 256000) == ()
    [fault] = faults(16384, 256000, kind="i32")
    assert fault.startswith("an index of 32 bits is up to 4194048000: arith.muli")
    assert faults(8192, 256000, kind="i32") == ()  # 2^30.97


def test_what_is_beside_a_table_is_found() -> None:
    assert faults(100, 128, compared="sle") == ("reads 512 bytes behind the end of argument 0",)
    assert faults(100, 128, nbytes=4 * 99 * 128) == ("reads 4 bytes behind the end of argument 0",)
    unmasked = LAST.replace(", %6, %cst", "")
    assert faults(128, 128, body=unmasked) == ()
    assert faults(100, 128, body=unmasked) == (f"reads {4 * 28 * 128} bytes behind the end of argument 0",)
    shifted = LAST.replace("%10", "%17").replace(
        "%11", "%17 = tt.addptr %10, %30 : tensor<64x!tt.ptr<f32>>, tensor<64xi32>\n    %11"
    )
    before = f"%30 = arith.constant dense<-1> : tensor<64xi32>\n    {shifted}"
    assert faults(100, 128, body=before) == ("reads 4 bytes before the beginning of argument 0",)


def test_pages_beyond_2_31_elements_and_numbers_that_may_be_anything() -> None:
    """A cache of 70,000 pages of 32,768 elements: 2^31.09."""
    room = 4 * 70_000 * 32768
    known = {"body": PAGES, "columns": 32768, "nbytes": room}
    assert faults(64, 1, **known, numbers=(0, 65535)) == ()  # type: ignore[arg-type]
    assert faults(64, 1, **known, numbers=(0, 69_999)) == (  # type: ignore[arg-type]
        f"an index of 32 bits is up to {69_999 * 32768}: arith.muli %13, %width : tensor<64xi32>",
    )
    assert len(faults(64, 1, **known)) == 3  # type: ignore[arg-type]  # before, behind, and beyond 32 bits


def test_what_a_loop_carries_is_followed() -> None:
    """A number that is loaded in one iteration is an index in the next."""
    assert faults(1, 1, body=COUNTED, numbers=(0, 0)) == ()
    assert faults(1, 1, body=COUNTED, numbers=(0, 5)) == ("reads 20 bytes behind the end of argument 2",)
    counter = COUNTED.replace("%arg2, %arg10", "%arg2, %arg9")
    assert faults(1, 1, body=counter, numbers=(0, 5)) == ()
    assert faults(3, 1, body=counter, numbers=(0, 5)) == ("reads 8 bytes behind the end of argument 2",)


def test_places_of_equal_blocks_along_other_axes_are_not_taken_for_one() -> None:
    """A mask over the columns does not bound the rows, even if both are lanes of one block."""
    body = """%12 = tt.expand_dims %2 {axis = 0 : i32} : tensor<64xi32> -> tensor<1x64xi32>
    %13 = tt.expand_dims %2 {axis = 1 : i32} : tensor<64xi32> -> tensor<64x1xi32>
    %14 = tt.splat %arg1 : i32 -> tensor<1x64xi32>
    %15 = arith.cmpi slt, %12, %14 : tensor<1x64xi32>
    %16 = tt.broadcast %15 : tensor<1x64xi1> -> tensor<64x64xi1>
    %17 = tt.broadcast %WHICH : tensor<SHAPExi32> -> tensor<64x64xi32>
    %18 = tt.splat %arg0 : !tt.ptr<f32> -> tensor<64x64x!tt.ptr<f32>>
    %19 = tt.addptr %18, %17 : tensor<64x64x!tt.ptr<f32>>, tensor<64x64xi32>
    %21 = arith.constant dense<0.000000e+00> : tensor<64x64xf32>
    %20 = tt.load %19, %16, %21 : tensor<64x64x!tt.ptr<f32>>"""
    assert faults(10, 1, body=body.replace("WHICH", "12").replace("SHAPE", "1x64")) == ()
    assert faults(10, 1, body=body.replace("WHICH", "13").replace("SHAPE", "64x1")) != ()


def test_a_group_whose_first_column_is_inside_is_inside() -> None:
    """Groups of 32 columns whose first column is masked: K is a multiple of 32, or is not."""
    body = """%12 = arith.constant dense<32> : tensor<64xi32>
    %13 = arith.muli %2, %12 : tensor<64xi32>
    %14 = arith.cmpi slt, %13, %5 : tensor<64xi32>
    %15 = arith.constant dense<31> : tensor<64xi32>
    %16 = arith.addi %13, %15 : tensor<64xi32>
    %17 = tt.addptr %9, %16 : tensor<64x!tt.ptr<f32>>, tensor<64xi32>
    %18 = tt.load %17, %14, %cst : tensor<64x!tt.ptr<f32>>"""
    assert faults(96, 1, body=body) == ()
    assert faults(100, 1, body=body) == (f"reads {4 * 28} bytes behind the end of argument 0",)
    assert Form(-95, {UnknownInteger(0, 9, 4): 8}).tight.constant == -64
    assert Form(np.array([-95, 1]), {UnknownInteger(0, 9): -8}).tight.constant.tolist() == [-88, 8]  # type: ignore[union-attr]


@pytest.mark.parametrize(("kind", "shown"), [("ogt", True), ("one", True), ("oge", False), ("ugt", False)])
def test_what_is_not_the_number_of_masked_elements_was_loaded(kind: str, shown: bool) -> None:
    """Tokens are loaded if their logits are larger than the value for masked elements."""
    body = f"""{LAST}
    %12 = arith.cmpf {kind}, %11, %cst : tensor<64xf32>
    %13 = tt.load %10, %12, %cst : tensor<64x!tt.ptr<f32>>"""
    assert (faults(100, 1, body=body) == ()) == shown
    assert faults(100, 1, body=body.replace("%11, %cst :", "%11, %other :").replace("%12 =", f"{OTHER}\n    %12 ="))


def test_facts_are_put_together() -> None:
    """token < end - start, so start + token < end; and quotient and remainder of a division."""
    start, end, token = (UnknownInteger(0, 100) for _ in range(3))
    facts = [Form.of(token).plus(Form.of(end), -1).plus(Form.of(start)).plus(Form(1))]
    assert upper(Form.of(start).plus(Form.of(token)), facts) == 99
    part = UnknownInteger(0, 1000)
    part.facts = [Form.of(part).times(16).plus(Form.of(token), -1)]
    assert upper(Form.of(part), []) == 6 and upper(Form.of(part).times(7), []) == 42
    assert lower(Form.of(token).plus(Form.of(part), -16), []) == 0
    nobody = Form(np.array([1, 0]))  # at most 0 in the second sample only
    assert upper(Form.of(token), [nobody], np.array([5, 100])).tolist()[1] == 100
    assert np.all(upper(Form.of(token), [nobody]) <= np.array([-1, 100]))
    evens = UnknownInteger(0, 101, 4)
    assert upper(Form.of(evens).times(3).plus(Form(1)), []) == 301


@pytest.mark.parametrize(
    ("text", "shape", "element", "pointer"),
    [("tensor<4x32x!tt.ptr<bf16>>", (4, 32), "bf16", True), ("!tt.ptr<i8>", (), "i8", True), ("i32", (), "i32", False),
     ("tensor<8xi1>", (8,), "i1", False)],
)  # fmt: skip
def test_types_are_read(text: str, shape: tuple[int, ...], element: str, pointer: bool) -> None:
    assert TtirType.parse(text) == TtirType(shape, element, pointer)
