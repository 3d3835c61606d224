"""The names that --explain accepts before any pass is imported are those of the passes and rules."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from icc.compiler.errors import UsageError
from icc.passes import registry
from icc.passes.rules import Rule

PASSES = Path(inspect.getfile(registry)).parent


def subclasses(cls: type) -> list[type]:
    return [found for sub in cls.__subclasses__() for found in (sub, *subclasses(sub))]


def test_every_rule_is_listed() -> None:
    for name in registry.PASSES:
        registry.find_pass(name)
    rules = {cls.name for cls in subclasses(Rule) if cls.__module__.startswith("icc.") and "name" in vars(cls)}
    written = {name for file in PASSES.rglob("*.py") for name in re.findall(r'Refusal\("([\w-]+)"', file.read_text())}
    assert rules | written == set(registry.RULES)


def test_what_is_known_and_what_is_not() -> None:
    for name in ("rms-norm", "fuse-add-norm", "quantize"):
        registry.check_explainable(name)
    with pytest.raises(UsageError, match="rms-nrom"):
        registry.check_explainable("rms-nrom")
