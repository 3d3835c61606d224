"""The C++ compiler of CPU targets: the one CXX names, else g++, else clang from PyPI's package `ziglang`."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec

from .errors import ToolchainError

ZIG = "zig"  # as the value of CXX: the package's clang, even if g++ is installed


def find_compiler() -> list[str]:
    """The command of the C++ compiler, without arguments; ToolchainError if there is no compiler."""
    named = os.environ.get("CXX")
    zig = find_zig() if find_spec("ziglang") else None
    if named == ZIG and zig:
        return zig
    compiler = named or "g++"
    if shutil.which(compiler):
        return [compiler]
    if zig and not named:
        return zig
    package = "ziglang" if named in (None, ZIG) else ""
    raise ToolchainError([compiler], f"error: {compiler} is not installed", package)


def find_zig() -> list[str]:
    """The command of the package's clang, which compiles for every machine; ToolchainError if it is not installed."""
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang"]
    raise ToolchainError([ZIG], "error: the package ziglang is not installed", "ziglang")
