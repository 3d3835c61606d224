"""RELIABILITY S1: no shipped code turns data into code. Checked by syntax; the server's tests check it at run time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import ROOT

SHIPPED = sorted(
    file for part in ("compiler", "passes", "runtime", "samples", "benchmarks") for file in (ROOT / part).rglob("*.py")
)
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "yaml", "code", "codeop", "runpy"}
BUILTINS = {"eval", "exec", "compile", "__import__", "execfile"}
CALLS = {
    ("os", "system"), ("os", "popen"), ("torch", "load"),
    ("subprocess", "getoutput"), ("subprocess", "getstatusoutput"), ("importlib", "import_module"),
}  # fmt: skip
# file: the calls that it may make, and why
ALLOWED = {
    "compiler/engine/directory.py": {"marshal", "compile"},  # writes bytecode of the runtime's own sources
    "benchmarks/record_loftq.py": {"exec"},  # peft's own function, for the CPU; makes a file that tests read
    "runtime/executor/cuda/driver.py": {"importlib.import_module"},  # one of two constant names of NVIDIA's bindings
    "runtime/server/nixl/library.py": {"importlib.import_module"},  # one of three constant names of NIXL's packages
}


def breaches(source: str) -> Iterator[tuple[int, str]]:
    """The line and the name of each forbidden call."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in MODULES:
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[tuple[int, str]]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in BUILTINS:
        yield node.lineno, function.id
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        if (function.value.id, function.attr) in CALLS and not _safe_load(node):
            yield node.lineno, f"{function.value.id}.{function.attr}"
    for keyword in node.keywords:
        if keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and not _is(keyword.value, False):
            yield node.lineno, keyword.arg or ""


def _safe_load(node: ast.Call) -> bool:
    """Whether the call is torch.load with weights_only, which reads only pickles of tensors."""
    return any(keyword.arg == "weights_only" and _is(keyword.value, True) for keyword in node.keywords)


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_shipped_file_makes_code_of_data(file: Path) -> None:
    allowed = ALLOWED.get(str(file.relative_to(ROOT)), set())
    assert [found for found in breaches(file.read_text()) if found[1] not in allowed] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from yaml import load", "eval(x)", "exec(x)", "compile(x, '', 'exec')", "torch.load(x)",
        "os.system(x)", "subprocess.run(x, shell=True)", "f(shell=y)", "f(trust_remote_code=z)",
        "np.load(x, allow_pickle=True)", "importlib.import_module(x)",
    ],
)  # fmt: skip
def test_the_ban_would_notice(source: str) -> None:
    assert list(breaches(source))


def test_what_is_allowed_is_still_needed() -> None:
    for file, names in ALLOWED.items():
        assert {name for _, name in breaches((ROOT / file).read_text())} == names, file
