"""The wheel, and environments with only the base package's requirements, all built without a network.

Such an environment is a real virtual environment whose site-packages links to chosen distributions of the environment
that runs the tests; other distributions are missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Iterable
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import icc
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", "venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "*.safetensors"
)
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))} | {"PIP_CONFIG_FILE": os.devnull}


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command that sees neither this checkout nor this process's settings."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=CLEAN, capture_output=True, text=True)
    assert not check or done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that earlier builds and concurrent edits have no effect."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "icc", ignore=NOT_SOURCE))


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation")
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", out, source, cwd=out)
    [file] = out.iterdir()
    return file


def requirements(wheel: Path, extra: str = "") -> dict[str, Distribution]:
    """The distributions that pip would install with the wheel and `extra`, directly or indirectly required, by name."""
    with zipfile.ZipFile(wheel) as archive:
        [info] = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        needed = list(PathDistribution(zipfile.Path(archive, f"{info}/")).requires or [])
    found: dict[str, Distribution] = {}
    wanted = [(Requirement(text), extra) for text in needed]
    while wanted:
        requirement, of_extra = wanted.pop()
        name = requirement.name.lower().replace("_", "-")
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": of_extra})
        if not applies or name in found:
            continue
        found[name] = distribution(name)
        wanted += [(Requirement(text), "") for text in found[name].requires or []]
    return found


MakeEnvironment = Callable[[Iterable[Distribution]], Path]


@pytest.fixture(scope="session")
def make_environment(tmp_path_factory: pytest.TempPathFactory) -> MakeEnvironment:
    """Makes a virtual environment that holds these distributions and no others; returns its bin directory."""

    def make(distributions: Iterable[Distribution]) -> Path:
        root = tmp_path_factory.mktemp("environment")
        venv.EnvBuilder(symlinks=True).create(root)
        [site] = root.glob("lib/python*/site-packages")
        for item in distributions:
            tops = {file.parts[0] for file in item.files or [] if file.parts[0] not in ("..", "__pycache__")}
            for top in tops:
                if not (site / top).exists():
                    (site / top).symlink_to(Path(str(item.locate_file(top))).resolve())
        return root / "bin"

    return make


@pytest.fixture(scope="session")
def base_install(wheel: Path, make_environment: MakeEnvironment) -> Path:
    """The bin directory of an environment after `pip install icc` without extras: pip finds every requirement met."""
    bin_dir = make_environment(requirements(wheel).values())
    python = bin_dir / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", wheel, cwd=bin_dir)
    return bin_dir


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample checkpoint, compiled for this machine."""
    path = tmp_path_factory.mktemp("engine") / "pystd.engine"
    return icc.compile(ROOT / "samples" / "pystd", path, target="native", quant="rtn4")
