"""Errors of code generation: a program that cannot be rendered, and a C++ compiler that is missing or fails."""

from __future__ import annotations

from ...runtime.errors import IccError


class CodegenError(IccError):
    """The program holds a kernel that the backend cannot generate; names the kernel and the reason."""

    exit_code = 30


class KernelRefused(CodegenError):
    """The compiler cannot make a kernel, or a check refuses its object; another tiling may work."""


class ToolchainError(IccError):
    """The C++ compiler could not be run or refused generated code. `cmd` and `stderr` hold the details.

    package: a package of PyPI with a compiler, if none is installed.
    """

    exit_code = 31

    def __init__(self, cmd: list[str], stderr: str, package: str = "") -> None:
        first = next(
            (line for line in stderr.splitlines() if "error" in line), stderr.strip().splitlines()[-1:] or [""]
        )
        detail = first if isinstance(first, str) else first[0]
        hint = "icc needs g++ 11 or newer, CXX may name one; headers of other packages are in the source, too"
        if package:
            hint = f"install g++ 11 or newer, or a compiler from PyPI: pip install {package}"
        super().__init__(f"C++ compiler failed: {detail.strip()}", hint)
        self.cmd = cmd
        self.stderr = stderr
