"""Kernels of arm64 under an emulator: products are right at odd shapes and bit-equal to x86's, whichever instructions
multiply.

They run where ICC_ARM64_PYTHON names an arm64 Python (tests/arm64_python.sh makes one).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from cpu_arm64 import Arrays, needs_arm64, steps_on_arm64
from cpu_cases import add_linear_q, add_quantize, dequantize
from cpu_harness import Batch, Builder, Case, Runner, flat_batch
from cpu_program import all_ops, feeds_of, keep
from gguf_models import random_blocks
from icc.compiler.backends.cpu.build import build_libraries
from icc.compiler.backends.cpu.isa import DOTPROD, I8MM, Isa, host_isas
from icc.compiler.backends.cpu.layouts.registry import LAYOUTS
from icc.compiler.frontend.source.gguf.tensors import BlockTensor
from icc.compiler.program.layout import Stored
from icc.compiler.program.steps.linear import LinearQ
from icc.compiler.weights.formats.ggml import GGML_FORMATS
from icc.runtime.format.gguf import GgufTensor
from sizes import SOAK, soak

pytestmark = needs_arm64
TOKENS = (5, 8, 11, 29, *((1, 2, 3, 4, 16, 43) if SOAK else ()))  # kernels have 1, 2, 3, 4, 6, 8, 12, 16 and 24 rows
# kinds that are decoded differently: bits, upper bits in a line of their own, minima, tables, integer scales
BLOCKS = ("q4_0", "q3_k", "iq4_nl", *(("q8_0", "q2_k", "q5_k", "q6_k", "iq2_xs", "mxfp4") if SOAK else ()))
SOME = "linear_(q4_g128_256|q8_g(64|512)|q8s_g16|i7_g16).*|experts_q4_top3|screened"
OPS = "linear_[qi].*|experts_q.*|screened.*" if SOAK else SOME
K, N = 512, 35


def add_blocks(b: Builder, kind: str, folder: Path) -> None:
    """A product with random blocks of a file's format."""
    rng = np.random.default_rng(2)
    raw = random_blocks(gguf.GGMLQuantizationType[kind.upper()], N, K, rng)
    (folder / kind).write_bytes(raw.tobytes())
    tensor = BlockTensor(GgufTensor(kind, folder / kind, 0, raw.nbytes, (N, K), kind), GGML_FORMATS[kind])
    x = add_quantize(b, f"blocks_{kind}", K, tensor.storage.row_group, False)
    stored = Stored(kind, "product")
    packed = LAYOUTS.of(stored).pack({name: part.numpy() for name, part in tensor.parts().items()})
    exact = tensor.load().double().numpy()
    y, w = b.buffer(f"blocks_{kind}.y", [N]), b.weight(f"blocks_{kind}.w", packed, kind, (N, K))
    b.step(LinearQ(x=x, w=w, y=y, k=K, n=N, stored=stored))

    def expect(a: Arrays) -> Arrays:
        return {y.name: dequantize(a[x.codes.name], a[x.scales.name].astype(np.float64)) @ exact.T}

    b.cases.append(Case(f"blocks_{kind}", {}, expect, 2e-5))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Products of every layout of codes, including experts and screened heads."""
    found, folder = all_ops(), tmp_path_factory.mktemp("blocks")
    add_linear_q(found, np.random.default_rng(3), 1024, 17, "q8", 512, False)  # a larger group than is staged at once
    for kind in BLOCKS:
        add_blocks(found, kind, folder)
    keep(found, f"(quantize_)?({OPS}|blocks_.*)")
    return found


@pytest.fixture(scope="module")
def steps(program: Builder) -> list[tuple[Batch, Arrays]]:
    batches = [flat_batch(tokens) for tokens in TOKENS]
    batches[0].greedy = True  # screened
    return [(batch, feeds_of(program, batch)) for batch in batches]


@pytest.fixture(scope="module")
def of_x86(
    program: Builder, steps: list[tuple[Batch, Arrays]], tmp_path_factory: pytest.TempPathFactory
) -> list[Arrays]:
    """The results of this machine, from kernels for two numbers of rows: the bits of a row do not depend on that
    number."""
    folder, isa = tmp_path_factory.mktemp("x86"), host_isas()[0]
    few = replace(isa, quant_blocks=tuple(block for block in isa.quant_blocks if block.rows in (1, 6)))
    [built] = build_libraries(program.program(), folder / "kernels", [few], optimize="-O1")
    runner = Runner(folder / built.path, program)
    found = [runner.step(batch, feeds) for batch, feeds in steps]
    runner.close()
    return found


@pytest.mark.parametrize("isa", [I8MM, *soak(DOTPROD)], ids=lambda isa: isa.name)
def test_products_have_the_bits_of_x86(
    isa: Isa, program: Builder, steps: list[tuple[Batch, Arrays]], of_x86: list[Arrays], tmp_path: Path
) -> None:
    shipped = "-O3" if SOAK else "-O1"
    [built] = build_libraries(program.program(), tmp_path / "kernels", [isa], optimize=shipped)
    (tmp_path / "files").mkdir()
    cpu = "max" if isa == I8MM else "neoverse-n1"  # traps on instructions that dotprod must not use
    found = steps_on_arm64(tmp_path / built.path, program, steps, tmp_path / "files", cpu)
    outputs = [o.name for step in program.steps for o in step.outputs.values() if o]
    for (batch, _), ours, theirs in zip(steps, found, of_x86, strict=True):
        for name in outputs:
            first, count = program.columns.get(name, (0, ours[name].shape[-1]))
            pair = [np.ascontiguousarray(found[name][..., first : first + count]) for found in (ours, theirs)]
            assert pair[0].tobytes() == pair[1].tobytes(), (name, batch.tokens)
        for case in program.cases:
            if batch.greedy and case.name.startswith("screened"):  # the other logits are minus infinity
                continue
            for output, expected in case.expect({**batch.arrays(), **ours}).items():
                limit = case.tolerance * max(1.0, np.abs(expected).max())
                assert np.abs(ours[output] - expected).max() <= limit, (output, batch.tokens)
