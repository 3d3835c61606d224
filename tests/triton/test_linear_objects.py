"""What the compiled products are made of: what a device would show as slow is visible in the disassembly.

Weights are fetched by asynchronous copies and multiplied by matrix instructions; codes become operands in registers by
shifts and masks, never by conversions; nothing spills.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from icc.compiler.backends.triton.objects.compile import compile_specs, spec_key
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.ops.body import Body
from icc.compiler.program.steps.linear import Columns, Epilogue
from icc.compiler.targets import TARGETS
from interpreting import LIMITS, make_kernel

GATE = Epilogue(Body.parse("t0 = silu a0; t1 = mul t0 a1"), (Columns(0, 1), Columns(4096, 1)), 4096)
CODES = make_kernel("linear_q", k=4096, n=8192, stored="q4g128", types=("bf16", "u8", "", "bf16"), epilogue=GATE)
DENSE = make_kernel("linear", k=4096, n=8192, stored="bf16", types=("bf16", "bf16", "", "bf16"), epilogue=GATE)
CASES = [
    # kernel, phase, the matrix instruction that is expected
    (CODES, Shape(1, True), "HMMA"),
    (CODES, Shape(64, True), "HGMMA"),
    (DENSE, Shape(1, True), "HMMA"),
    (DENSE, Shape(1024, False), "HGMMA"),
]


def disassemble(binary: bytes, folder: Path) -> Counter[str]:
    """How often each instruction occurs."""
    nvidia = pytest.importorskip("triton.backends.nvidia")
    tool = Path(next(iter(nvidia.__path__))) / "bin" / "cuobjdump"
    path = folder / "object.cubin"
    path.write_bytes(binary)
    text = subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?(\w+)", text, re.M)
    return Counter(lines)


def test_products_for_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ICC_CACHE_DIR", str(tmp_path))
    target = TARGETS["h200"]
    specs = [kernel.launches(shape, LIMITS, Tuner(target))[0] for kernel, shape, _ in CASES]
    compiled = compile_specs(specs, target)
    for spec, (kernel, shape, matrix) in zip(specs, CASES, strict=True):
        found = compiled[spec_key(spec)]
        counts = disassemble(found.binary, tmp_path)
        said = f"{kernel.mode} {shape}: {counts}"
        assert found.spill_bytes == 0 and not counts["STL"] and not counts["LDL"], said
        assert found.shared_bytes <= target.shared_memory_kib * 1024, said
        assert counts["LDGSTS"] and counts[matrix], said
        assert counts["I2F"] + counts["I2FP"] < 4, said  # a division of addresses is one
