"""The pointwise and row kernels compile for a GPU and keep all their values in registers."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from icc.compiler.backends.triton.build.compile import compile_specs, spec_key
from icc.compiler.backends.triton.kernels.bmm import Bmm
from icc.compiler.backends.triton.kernels.index import INDEXED
from icc.compiler.backends.triton.kernels.pointwise import Pointwise
from icc.compiler.backends.triton.kernels.rowwise import ROWWISE
from icc.compiler.backends.triton.spec import Shape, TritonKernel
from icc.compiler.ops.body import Argument, BodyWriter, Literal, Operand
from icc.compiler.ops.pointwise import OPCODES
from icc.compiler.targets import TARGETS
from icc.runtime.format.access import Access
from interpreting import LIMITS, TUNER

PAIRS = {"add", "sub", "mul", "div", "floordiv", "remainder", "pow", "maximum", "minimum", "eq", "ne", "lt", "le", "gt"}
PAIRS |= {"ge", "logical_and", "logical_or"}


def chain(kind: str) -> Pointwise:
    """One kernel with every opcode over two operands of one type."""
    write = BodyWriter()
    x, y = Argument(0), Argument(1)
    last: Operand = Literal.of(-inf)
    for opcode in OPCODES:
        operands = [x, x, y] if opcode == "where" else [x, y] if opcode in PAIRS else [x]
        last = write("add", write(opcode, *operands), last)
    return Pointwise(
        shape=(100,), inputs=(Access(kind, 100, (1,)), Access(kind, 0, (0,))), body=write.finish(last),
        output=Access("f32", 100, (1,)), types=(kind, kind, "f32"), aligned=(True,) * 3,
    )  # fmt: skip


def kernels(kind: str) -> list[TritonKernel]:
    """Each kernel at a size that is no power of two, over activations of that type."""
    two, three = {"types": (kind,) * 2, "aligned": (True,) * 2}, {"aligned": (True,) * 3}
    line = {"outer": 2, "n": 5000, "x_stride": 10000}
    return [
        *(ROWWISE["reduce"](op=op, inner=1, y_stride=2, **line, **two) for op in ("mean", "prod", "amin")),
        ROWWISE["softmax"](y_stride=10000, **line, **two),
        ROWWISE["cumsum"](y_stride=10000, **line, **two),
        INDEXED["topk"](k=6, values_stride=12, indices_stride=12, types=(kind, kind, "i32"), **line, **three),
        INDEXED["gather"](m=6, index_stride=12, y_stride=12, types=(kind, "i32", kind), **line, **three),
        INDEXED["scatter"](
            m=6, index_stride=12, y_stride=10000, reduce="none", src="value", value="-inf",
            types=(kind, "i32", "", kind), aligned=(True,) * 4, **line,
        ),
        INDEXED["embedding"](n=100, y_stride=100, table_rows=9, format=kind, types=("i32", kind, "f32"), **three),
        INDEXED["select_rows"](n=100, x_stride=100, y_stride=100, **two),
        Bmm(
            batch=2, m=1, k=100, n=60, b_transposed=True, a_row_stride=200, b_row_stride=0, c_row_stride=120,
            types=(kind,) * 3, **three,
        ),
    ]  # fmt: skip


def test_compiles_without_spilling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ICC_CACHE_DIR", str(tmp_path))
    target = TARGETS["h100"]
    shapes = (Shape(1, True), Shape(64, True))
    specs = [spec for kernel in kernels("bf16") for shape in shapes for spec in kernel.launches(shape, LIMITS, TUNER)]
    found = compile_specs([*specs, *chain("f32").launches(Shape(1, True), LIMITS, TUNER)], target)
    assert {spec.entry: found[spec_key(spec)].spill_bytes for spec in specs} == dict.fromkeys(
        (s.entry for s in specs), 0
    )
