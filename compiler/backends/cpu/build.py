"""Compiles a program into one shared object per ISA level: in parallel, byte-identical for equal programs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ....runtime.format.manifest import Library
from ....runtime.system import WINDOWS
from ...interrupt import Processes
from ...program.program import Program
from ..errors import ToolchainError
from .emit import emit_source
from .isa import ALL, Isa
from .toolchain import SUFFIXES, compile_commands, without_time


def _run(compilers: Processes, command: list[str], folder: Path) -> None:
    """Run one compiler command in `folder`; ToolchainError if the compiler is missing or fails."""
    try:
        with compilers.running(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            said = process.communicate()[1]
    except FileNotFoundError:
        raise ToolchainError(command, f"error: {command[0]} is not installed") from None
    if process.returncode:
        raise ToolchainError(command, said)


def _build(
    compilers: Processes, program: Program, kernels_dir: Path, isa: Isa, sanitize: str | None, optimize: str
) -> Library:
    source, output = f"{isa.stem}.cpp", f"{isa.stem}.{SUFFIXES[isa.system]}"
    (kernels_dir / source).write_text(emit_source(program, isa))
    for command in compile_commands(isa, source, output, sanitize, optimize):
        _run(compilers, command, kernels_dir)
    for beside in (f"{isa.stem}.o", f"{isa.stem}.pdb", f"{isa.stem}.lib"):
        (kernels_dir / beside).unlink(missing_ok=True)
    if isa.system == WINDOWS:
        without_time(kernels_dir / output)
    return Library(isa.name, f"{kernels_dir.name}/{output}", list(isa.cpu_flags), isa.system)


def build_libraries(
    program: Program,
    kernels_dir: Path,
    isas: Sequence[Isa] = ALL,
    jobs: int = 2,
    sanitize: str | None = None,
    optimize: str = "-O3",
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> list[Library]:
    """Write the source and the library of each level into `kernels_dir`; returns the libraries in the order of `isas`.

    `sanitize` is the argument of -fsanitize (for tests), None for none. Paths in the result are relative to
    kernels_dir's parent.
    """
    kernels_dir.mkdir(parents=True, exist_ok=True)
    with Processes() as compilers, ThreadPoolExecutor(max_workers=jobs) as pool:
        tasks = {pool.submit(_build, compilers, program, kernels_dir, isa, sanitize, optimize): isa for isa in isas}
        progress(", ".join(isa.stem for isa in isas), 0, len(isas))
        try:
            for done, task in enumerate(as_completed(tasks), 1):
                progress(tasks[task].stem, done, len(isas))
        except KeyboardInterrupt:
            compilers.end()
            raise
        return [task.result() for task in tasks]
