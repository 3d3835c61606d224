"""The pointwise and row kernels compile for a GPU and keep all their values in registers."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from icc.compiler.backends.triton.kernels.state import GatedScanKernel
from icc.compiler.backends.triton.objects.compile import compile_specs, spec_key
from icc.compiler.backends.triton.spec import Shape, TritonKernel
from icc.compiler.ops.body import Argument, BodyWriter, Literal, Operand
from icc.compiler.ops.pointwise import OPCODES
from icc.compiler.targets import TARGETS
from interpreting import LIMITS, TUNER, make_kernel

PAIRS = {"add", "sub", "mul", "div", "floordiv", "remainder", "pow", "maximum", "minimum", "eq", "ne", "lt", "le", "gt"}
PAIRS |= {"ge", "logical_and", "logical_or"}


def chain(kind: str) -> TritonKernel:
    """One kernel with every opcode over two operands of one type."""
    write = BodyWriter()
    x, y = Argument(0), Argument(1)
    last: Operand = Literal.of(-inf)
    for opcode in OPCODES:
        operands = [x, x, y] if opcode == "where" else [x, y] if opcode in PAIRS else [x]
        last = write("add", write(opcode, *operands), last)
    facts = {"shape": (100,), "walks": ((1,), (0,), (1,)), "strides": {"args.1": 0}}
    return make_kernel("pointwise", types=(kind, kind, "f32"), body=write.finish(last), **facts)


def kernels(kind: str) -> list[TritonKernel]:
    """Each kernel at a size that is no power of two, over activations of type `kind`."""
    two, line, scan = (
        (kind, kind),
        {"outer": 2, "n": 5000},
        {"heads": 4, "shared": 2, "key_dim": 128, "value_dim": 96, "chunk": 0},
    )
    index = scatter = (kind, "i32", "", kind)
    return [
        *(make_kernel("reduce", types=two, reduction=how, **line) for how in ("mean", "prod", "amin")),
        make_kernel("softmax", types=two, **line),
        make_kernel("hadamard", types=two, outer=3, n=512),
        make_kernel("cumsum", types=two, **line),
        make_kernel("topk", k=6, types=(kind, kind, "i32"), **line),
        make_kernel("gather", m=6, types=index, **line),
        make_kernel("scatter", m=6, value="-inf", types=scatter, **line),
        make_kernel("embedding", n=100, table_rows=9, stored=kind, types=("i32", kind, "f32")),
        make_kernel("select_rows", n=100, rows="logit_rows", types=two),
        make_kernel("causal_conv", channels=100, taps=4, block_size=32, types=(kind, "f32", "", kind)),
        make_kernel("gated_scan", delta=True, block_size=32, types=(kind, kind, kind, "f32", "f32", kind), **scan),
        make_kernel("selective_scan", channels=100, states=16, block_size=32, types=(kind, "f32", "f32", *(kind,) * 3)),
        make_kernel("channel_scan", channels=100, maximum=True, block_size=32, types=("f32", "f32", "f32")),
        make_kernel("bmm", batch=2, m=1, k=100, n=60, b_transposed=True, strides={"b": 0}, types=(kind,) * 3),
    ]


@pytest.mark.parametrize("rows", [1, 64])
def test_compiles_without_spilling(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ICC_CACHE_DIR", str(tmp_path))
    specs = [spec for kernel in kernels("bf16") for spec in kernel.launches(Shape(rows, True), LIMITS, TUNER)]
    if rows > 1:
        [scan] = [kernel for kernel in kernels("bf16") if isinstance(kernel, GatedScanKernel)]
        specs += scan.launches(Shape(rows, False), LIMITS, TUNER)  # as chunks
    others = chain("f32").launches(Shape(1, True), LIMITS, TUNER) if rows == 1 else []
    found = compile_specs([*specs, *others], TARGETS["h100"])
    assert {spec.entry: found[spec_key(spec)].spill_bytes for spec in specs} == dict.fromkeys(
        (s.entry for s in specs), 0
    )
