"""pyproject.toml and constraints.txt agree with the tree; the import contracts hold, and detect a breach."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from .conftest import NOT_SOURCE, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = ("torch", "transformers", "triton", "jinja2", "numpy", "tokenizers", "fastapi", "grpc")
BREACHES = {
    "runtime/commands/bench.py": ("import torch", "The runtime needs no compiler"),
    "passes/rules.py": ("from ..compiler.backends import render", "Passes know no program, backends"),
    "passes/fuse/add_norm.py": ("from . import merge_linears", "No pass imports another pass"),
    "compiler/ops/norm.py": ("from ..graph import printer", "Ops know no graph, program, backends or passes"),
    "compiler/backends/base.py": ("from ..frontend import load", "Program and backends know no passes"),
    "compiler/report.py": ("from ..runtime.executor import player", "Only compiler/measure runs an engine"),
    "compiler/speculate/tree.py": ("from .. import measure", "Only the driver and the CLI measure"),
    "compiler/cli.py": ("from .measure import staged", "They come in by its door"),
    "runtime/scheduler/request.py": ("import threading", "The scheduler is a pure state machine"),
    "compiler/weights/handles.py": ("from ..graph import graph", "No room imports a room that imports it"),
    "compiler/driver.py": ("import jinja2", "jinja2 has one home"),
    "compiler/options.py": ("import click", "click lives in the CLI files"),
    "compiler/targets.py": ("import triton", "triton has one home"),
    "compiler/phases.py": ("import onnx", "onnx is for exporting"),
    "compiler/onnx/export.py": ("from ..frontend import load", "Writing ONNX knows the graph"),
    "compiler/signing.py": ("import cryptography", "cryptography has one home"),
    "compiler/progress.py": ("import fastapi", "FastAPI has one home"),
    "runtime/commands/run.py": ("import llguidance", "The runtime needs no server"),
    "runtime/server/http/serve.py": ("import grpc", "gRPC has one home"),
    "runtime/loading.py": ("import ray", "Ray has one home"),
    "runtime/server/replicas.py": ("from ..ray import options", "Only commands know what runs on Ray"),
}


def test_every_package_is_listed() -> None:
    folders = {ROOT / "codegen_templates"}
    for part in ("compiler", "passes", "runtime"):
        folders |= {file.parent for file in (ROOT / part).rglob("*.py")}
    found = {".".join(["icc", *folder.relative_to(ROOT).parts]) for folder in folders}
    assert PROJECT["tool"]["setuptools"]["packages"] == sorted(found | {"icc"})


def test_every_package_has_an_init() -> None:
    names = PROJECT["tool"]["setuptools"]["packages"]
    folders = [ROOT.joinpath(*name.split(".")[1:]) for name in names if name != "icc.codegen_templates"]
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_every_direct_dependency_is_pinned_to_what_is_tested() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    direct = {Requirement(text).name for text in [*project["dependencies"], *(r for extra in extras for r in extra)]}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pins = dict(line.split("==") for line in lines)
    assert set(pins) == direct
    for name, pin in pins.items():
        try:
            assert version(name).split("+")[0] == pin, f"{name}: installed and pinned differ"
        except PackageNotFoundError:
            continue  # an extra that tests do not need


def lint_imports(folder: Path) -> str:
    """The output of import-linter for the package `icc` in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    code = "from importlinter.cli import lint_imports_command as main; main()"
    command = [sys.executable, "-c", code, "--no-cache", "--config", str(folder / "icc" / "pyproject.toml")]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout


def test_the_import_contracts_hold(tmp_path: Path) -> None:
    (tmp_path / "icc").symlink_to(ROOT)
    report = lint_imports(tmp_path)
    assert re.search(rf"Contracts: {len(BREACHES)} kept, 0 broken", report), report


def test_the_import_contracts_notice_breaches(tmp_path: Path) -> None:
    tree = shutil.copytree(ROOT, tmp_path / "icc", ignore=NOT_SOURCE)
    for name, (line, _) in BREACHES.items():
        with (tree / name).open("a") as file:
            file.write(f"\n{line}\n")
    report = lint_imports(tmp_path)
    broken = set(re.findall(r"^(.+) BROKEN", report, re.MULTILINE))
    missed = [contract for _, contract in BREACHES.values() if not any(name.startswith(contract) for name in broken)]
    assert not missed and f"Contracts: 0 kept, {len(BREACHES)} broken" in report, report


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["compile", "--help"], ["inspect", "--help"], ["run", "--help"]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from icc.compiler.cli import main\n"
        "try:\n"
        f"    main({arguments!r}, prog_name='icc')\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print('modules', *{name.split('.')[0] for name in sys.modules})"
    )
    shown, _, modules = python(code).rpartition("modules ")
    assert "icc" in shown and not set(modules.split()) & set(HEAVY)
    if arguments == ["--help"]:
        assert all(f"\n  {command} " in shown for command in ("bench", "compile", "eval", "inspect", "run", "serve"))


MISTAKES = {
    "no such pass": (["opt", "pyproject.toml", "-p", "simplify,fold"], "there is no pass 'fold'"),
    "no such option": (["compile", "model", "--no-such"], "No such option"),
    "no such method": (["compile", "model", "--quant", "q3"], "Invalid value for '--quant'"),
    "no such target": (["compile", "model", "--target", "h800"], "unknown target 'h800'"),
    "no such drafter": (["compile", "model", "--spec", "eagle"], "--spec 'eagle' is not known"),
    "a limit of nothing": (["compile", "model", "--max-batch-size", "0"], "--max-batch-size must be at least 1"),
    "no engine": (["run", "nothing", "-p", "a"], "nothing does not exist"),
    "not an engine": (["bench", "samples/pystd"], "`icc compile` it first"),
    "neither engine nor model": (["serve", "docs"], "it has no engine.json"),
    "no directory for the engine": (["compile", "model", "-o", "no/such/folder/x"], "is not a directory"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_before_torch_is_imported(mistake: str) -> None:
    """The answer took 4 s with torch, 0.2 s without."""
    arguments, message = MISTAKES[mistake]
    code = (
        "import sys\n"
        "from icc.compiler.cli import main\n"
        "try:\n"
        f"    main({arguments!r}, prog_name='icc')\n"
        "except SystemExit as end:\n"
        "    assert end.code\n"
        f"assert not set(sys.modules) & {set(HEAVY) - {'numpy'}!r}"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert message in found.stderr and not found.returncode, found.stderr


def test_an_engine_is_loaded_without_what_its_first_token_does_not_need() -> None:
    """numpy alone is a third of the start of a small engine, see runtime/late.py."""
    code = "import sys; import icc.runtime.loading; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=True)


def test_templates_and_data_are_found_from_the_installed_package() -> None:
    code = (
        "from icc.compiler.backends.render import TEMPLATES\n"
        "from icc.compiler.calibration import DEFAULT_TEXT\n"
        "print((TEMPLATES / 'cpp' / 'program.cpp.jinja').is_file(), DEFAULT_TEXT.is_file())"
    )
    assert python(code).split() == ["True", "True"]
