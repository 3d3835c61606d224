"""Compiles a program into one shared object per ISA level with g++: in parallel, byte-identical for equal programs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ....runtime.format.manifest import Library
from ...interrupt import Processes
from ...program.program import Program
from ..errors import ToolchainError
from .emit import emit_source
from .isa import ALL, Isa

# -ffp-contract=off: a compiler that fuses a*b+c here and not there would make a row's bits depend on its batch.
COMMON_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-fno-ident", "-w", "-pthread",
)  # fmt: skip
# For tests, and so that they build fast: checks are calls instead of inline code, and without those of pointers that
# AddressSanitizer makes again when the pointer is used.
SANITIZER_FLAGS = (
    "-fno-sanitize-recover=all", "--param=asan-instrumentation-with-call-threshold=0",
    "-fno-sanitize=null,object-size,pointer-overflow", "-fno-sanitize-address-use-after-scope", "-g1",
    "-fno-omit-frame-pointer",
)  # fmt: skip
LINK_FLAGS = ("-static-libstdc++", "-static-libgcc", "-Wl,--build-id=none", "-Wl,-s", "-Wl,--as-needed")


def compile_command(isa: Isa, source: str, output: str, sanitize: str | None, optimize: str) -> list[str]:
    """The compiler call, with paths relative to the directory it runs in."""
    cmd = [os.environ.get("CXX", "g++"), *COMMON_FLAGS, optimize, *isa.flags, f"-frandom-seed={isa.name}"]
    if sanitize:
        return [*cmd, f"-fsanitize={sanitize}", *SANITIZER_FLAGS, source, "-o", output]
    return [*cmd, "-ffile-prefix-map=./=", *LINK_FLAGS, source, "-o", output]


def _build(
    compilers: Processes, program: Program, kernels_dir: Path, isa: Isa, sanitize: str | None, optimize: str
) -> Library:
    source, output = f"{isa.name}.cpp", f"{isa.name}.so"
    (kernels_dir / source).write_text(emit_source(program, isa))
    cmd = compile_command(isa, source, output, sanitize, optimize)
    try:
        with compilers.running(
            cmd, cwd=kernels_dir, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            said = process.communicate()[1]
    except FileNotFoundError:
        raise ToolchainError(cmd, f"error: {cmd[0]} is not installed") from None
    if process.returncode:
        raise ToolchainError(cmd, said)
    return Library(isa.name, f"{kernels_dir.name}/{output}", list(isa.cpu_flags))


def build_libraries(
    program: Program,
    kernels_dir: Path,
    isas: Sequence[Isa] = ALL,
    jobs: int = 2,
    sanitize: str | None = None,
    optimize: str = "-O3",
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> list[Library]:
    """Write `<isa>.cpp` and `<isa>.so` for each level into `kernels_dir`; libraries in the order of `isas`.

    `sanitize` is the argument of -fsanitize (for tests). Paths in the result are relative to kernels_dir's parent.
    """
    kernels_dir.mkdir(parents=True, exist_ok=True)
    with Processes() as compilers, ThreadPoolExecutor(max_workers=jobs) as pool:
        tasks = {pool.submit(_build, compilers, program, kernels_dir, isa, sanitize, optimize): isa for isa in isas}
        progress(", ".join(isa.name for isa in isas), 0, len(isas))
        try:
            for done, task in enumerate(as_completed(tasks), 1):
                progress(tasks[task].name, done, len(isas))
        except KeyboardInterrupt:
            compilers.end()
            raise
        return [task.result() for task in tasks]
