"""Every cause of an error has its own exit code, and docs/exit-codes.md lists them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from icc.runtime.errors import IccError

PAGE = Path(__file__).parents[1] / "docs" / "exit-codes.md"


def subclasses(cls: type[IccError]) -> list[type[IccError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in subclasses(sub))]


def test_exit_codes_are_unique_and_documented() -> None:
    for module in ("icc.runtime.errors", "icc.compiler.errors", "icc.compiler.backends.errors"):
        importlib.import_module(module)
    own = [cls for cls in subclasses(IccError) if cls.__module__.startswith("icc.") and "exit_code" in vars(cls)]
    codes = {cls.__name__: cls.exit_code for cls in own}
    assert len(set(codes.values())) == len(codes), codes
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE)}
    assert set(codes.values()) <= listed, set(codes.values()) - listed
