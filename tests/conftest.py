"""Fixtures shared by all tests. `tiny` is the module tests/tiny_models.py: tests are not importable as a package."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for sizes.py and traced_once.py
import passed
import rare
import traced_once
from sizes import SOAK

# A shell makes a command in the background ignore Ctrl-C; the processes that tests interrupt would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # until the tests are collected
# An engine has hundreds of files, each of which waits for the disk. tests/engine/test_write_faults.py tests what a
# power loss leaves; its writers are separate processes.
os.fsync = lambda file: None
# Tensors are tiny and there is a worker per core: more threads only wait for each other, and spin while they do.
for _library in ("OMP", "MKL", "OPENBLAS"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
# Triton decides when it is first imported whether it interprets; compiling for a GPU happens in processes of its own.
os.environ["TRITON_INTERPRET"] = "1"
# Kernels that many tests need are compiled once for all processes of a run, at -O1; see the fixtures `compiler_runs`
# and `as_shipped`.
if SOAK:
    os.environ["ICC_AS_SHIPPED"] = "1"
_compiled_here = None  # a folder that this run removes; the one that ICC_COMPILED_ONCE names is kept for the next run
if "ICC_COMPILED_BY" not in os.environ:
    if "ICC_COMPILED_ONCE" not in os.environ:
        os.environ["ICC_COMPILED_ONCE"] = _compiled_here = tempfile.mkdtemp(prefix="icc-compiled-once-")
    Path(os.environ["ICC_COMPILED_ONCE"]).mkdir(exist_ok=True)
    os.environ["ICC_COMPILED_BY"] = os.environ.get("CXX", "g++")
    os.environ["CXX"] = str(Path(__file__).with_name("compile_once"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests that only `make soak` runs, and rare tests (rare.py). Long modules come first, so that at the end
    no worker runs one while the others are idle."""
    config.stash[rare.STALE] = rare.stale((item.nodeid for item in items), config.rootpath)
    if not SOAK:
        left_out = {item for item in items if item.get_closest_marker("soak")} | set(rare.left_out(config, items))
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=[*left_out])
    passed.leave_out(config, items)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    passed.note(report)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # imported objects stay: the garbage collector spends a tenth of the tests' time on them
    if "torch" in sys.modules:  # not in the process that only hands out tests
        traced_once.install()


def pytest_unconfigure(config: pytest.Config) -> None:
    if _compiled_here and not hasattr(config, "workerinput"):
        shutil.rmtree(_compiled_here, ignore_errors=True)


@pytest.fixture
def compiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the C++ compiler's output, or of what happens while it runs: nothing is reused, it runs every
    time."""
    monkeypatch.setenv("ICC_COMPILE_ANEW", "1")


@pytest.fixture
def as_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that need libraries optimized as for users; other tests build them at -O1, in half the time."""
    monkeypatch.setenv("ICC_AS_SHIPPED", "1")


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """Builders of tiny checkpoints: `tiny.tiny_configs()`, `tiny.save_tiny(config, path)`."""
    name = "tiny_models"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
