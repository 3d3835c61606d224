"""The names of `import icc`: all exist, and the signatures of icc.compile and icc.load are complete."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import icc
import pytest
from icc.compiler.api import CompileFields
from icc.compiler.errors import UsageError
from icc.compiler.options import CompileOptions

from .conftest import ROOT


def test_every_public_name_is_there() -> None:
    assert {"LLM", "CompileProgress", "IccError", "SamplingParams", "compile", "load"} <= set(icc.__all__)
    assert all(getattr(icc, name) is not None for name in icc.__all__) and set(icc.__all__) <= set(dir(icc))
    assert (ROOT / "py.typed").is_file()


def test_compile_takes_the_fields_of_its_options() -> None:
    """Their types are written twice, for type checkers; they are equal, except that a path may be a str."""
    options, keywords = get_type_hints(CompileOptions), get_type_hints(CompileFields)
    assert list(keywords) == [field.name for field in fields(CompileOptions) if field.name not in ("model", "output")]
    others = {name for name, hint in keywords.items() if options[name] != hint}
    assert others == {"calib", "gate_text", "lora", "like", "dump_passes", "prefix", "schema", "grammar"}
    shown = inspect.signature(icc.compile).parameters
    assert list(shown) == ["model", "output", "progress", *keywords]
    assert all(shown[f.name].default == f.default for f in fields(CompileOptions) if f.name in keywords)


def test_what_no_compile_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown compile option 'quantize'"):
        icc.compile(tmp_path, quantize="awq4")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="progress = 'bars'"):
        icc.compile(tmp_path, progress="bars")  # type: ignore[arg-type]
