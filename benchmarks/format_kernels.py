"""The speed of a format's micro-kernel on one core, with weights in its caches."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

KERNEL_K = 1536
DRIVER = """
extern "C" void rates(double* best, int repeats) {
    char* w = (char*)aligned_alloc(64, 1 << 22);
    memset(w, 0x11, 1 << 22);
    int8_t* x = (int8_t*)aligned_alloc(64, 1 << 16);
    memset(x, 5, 1 << 16);
    float *s = (float*)aligned_alloc(64, 1 << 16), *out = (float*)aligned_alloc(64, 1 << 14);
    for (int i = 0; i < (1 << 14); ++i) s[i] = 0.5f;
    const char* at[4] = {w, w + TILE, w + 2 * TILE, w + 3 * TILE};
    best[0] = best[1] = 1e18;
    for (int r = 0; r < repeats; ++r)
        for (int i = 0; i < 2; ++i) {
            const auto begin = std::chrono::steady_clock::now();
            for (int n = 0; n < 4; ++n) MICROS[i].run(at, x, s, s, GROUPS, GROUP, out);
            const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
            if (spent.count() / 4 < best[i]) best[i] = spent.count() / 4;
        }
    free(w), free(x), free(s), free(out);
}
"""


def kernel_speed(kind: str) -> tuple[float, float, float] | None:
    """Multiply-adds per ns with one row and with eight, GB/s with one; None if the format has float products."""
    from icc.compiler.backends.cpu.isa import host_isas
    from icc.compiler.backends.cpu.kernels.micro import quant_micro
    from icc.compiler.backends.cpu.layouts.codes import CodeTiles
    from icc.compiler.backends.cpu.layouts.registry import LAYOUTS
    from icc.compiler.backends.render import TEMPLATES, render
    from icc.compiler.weights.formats.registry import find_format

    layout = LAYOUTS.find(find_format(kind), "product")
    if not isinstance(layout, CodeTiles) or layout.misfit(64, KERNEL_K):
        return None
    isa = host_isas()[0]
    blocks = [next(b for b in isa.quant_blocks if b.rows == rows) for rows in (1, 8)]
    micros = [quant_micro(f"m{b.rows}", layout.reader, b, isa) for b in blocks]
    head = '#include "gemm.h"\n#include <chrono>\n#include <stdlib.h>\n'
    table = ", ".join(f"{{{b.rows}, {b.tiles}, m{b.rows}}}" for b in blocks)
    sizes = {"TILE": layout.tile_bytes(KERNEL_K), "GROUP": layout.group, "GROUPS": KERNEL_K // layout.group}
    constants = "".join(f"constexpr long {name} = {value};\n" for name, value in sizes.items())
    text = [head, *(render(m.template, m) for m in micros), f"static const QuantMicro MICROS[] = {{{table}}};\n"]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "a.cpp", Path(folder) / "a.so"
        source.write_text("\n".join([*text, constants, DRIVER]))
        flags = ["-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno"]
        subprocess.run(
            ["g++", *flags, *isa.flags, f"-I{TEMPLATES / 'cpp'}", str(source), "-o", str(library)], check=True
        )
        best = (ctypes.c_double * 2)()
        ctypes.CDLL(str(library)).rates(best, 300)
    done = [16 * KERNEL_K * b.rows * b.tiles / ns for b, ns in zip(blocks, best, strict=True)]
    return done[0], done[1], layout.tile_bytes(KERNEL_K) * blocks[0].tiles / best[0]
