"""A GPU engine through the real cuda-bindings, over a driver library without a GPU that refuses what a driver refuses:
launches that do not agree with their cubins, pointers outside of allocations, a missing context, sync in a capture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from icc.compiler.backends.errors import CodegenError
from icc.compiler.backends.triton.objects.cubin import check_launch, read_cubin, waits_first
from icc.compiler.backends.triton.spec import ONE, Arg, LaunchSpec
from icc.runtime.format.programs import decode_program

STUB = Path(__file__).with_name("stub_cuda.c")
SMALL = {"max_seq_len": 32, "max_batch_size": 2, "max_step_tokens": 16}

RUN = """
import runpy, sys
engine = sys.argv[1]
sys.argv = [engine, "run", "--ids", "1,2,3", "--max-tokens", "6", "--json"]
try:
    runpy.run_path(engine, run_name="__main__")
except SystemExit as end:
    code = end.code or 0
tops = {name.partition(".")[0] for name in sys.modules}
print(sorted(tops & {"torch", "transformers", "triton", "jinja2", "icc", "fastapi"}), file=sys.stderr)
sys.exit(code)
"""

THREADS = """
import sys, threading
sys.path.insert(0, sys.argv[2])
import icc
with icc.load(sys.argv[1]) as llm:
    found = []
    params = icc.SamplingParams(max_tokens=3, ignore_eos=True)
    other = threading.Thread(target=lambda: found.append(llm.generate([[1, 2]], params)[0].token_ids))
    other.start()
    other.join()
    found.append(llm.generate([[1, 2]], params)[0].token_ids)
    print(llm.logits([1, 2, 3]).shape, len(found), *map(len, found))
"""


class Ran(NamedTuple):
    code: int
    stdout: str
    stderr: str
    log: list[list[str]]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libcuda.so.1 without a GPU."""
    folder = tmp_path_factory.mktemp("stub")
    command = [
        "g++",
        "-x",
        "c",
        "-std=gnu11",
        "-shared",
        "-fPIC",
        "-O1",
        "-w",
        STUB,
        "-o",
        folder / "libcuda.so.1",
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="session")
def engine(compiled: Callable[..., Any]) -> Path:
    """A real engine with cubins, as small as possible, with an early exit as drafter."""
    return compiled("llama", "bfloat16", target="h100", quant="rtn4", spec="layer-skip:1", **SMALL).engine


def run(library: Path, script: str, *arguments: Any, cwd: Path, **more: str) -> Ran:
    log = cwd / "log"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TRITON"))}
    env |= {"LD_LIBRARY_PATH": str(library), "ICC_STUB_LOG": str(log), **more}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, timeout=120)
    assert log.exists(), done.stderr
    return Ran(done.returncode, done.stdout, done.stderr, [line.split() for line in log.read_text().splitlines()])


def test_the_engine_runs_itself_with_the_runtime_and_the_bindings_alone(
    engine: Path, library: Path, tmp_path: Path
) -> None:
    ran = run(library, RUN, engine, cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    assert len(json.loads(ran.stdout)["token_ids"]) == 6
    assert ran.stderr.strip().endswith("[]"), "it imported more than the runtime needs"
    launches = [line for line in ran.log if line[0] == "launch"]
    captured = [line for line in launches if line[7] == "1"]
    assert 0 < len(captured) < len(launches) and ["graph"] in ran.log
    assert ran.log[-1] == ["live", "0"], "something was not given back to the driver"
    assert {line[8] for line in launches} == {"1"}, "on sm_90 every kernel waits itself for the one before it"


def test_kernels_wait_to_be_launched_where_the_environment_says_so(engine: Path, library: Path, tmp_path: Path) -> None:
    ran = run(library, RUN, engine, cwd=tmp_path, ICC_DEPENDENT_LAUNCH="0")
    assert ran.code == 0, ran.stderr
    assert {line[8] for line in ran.log if line[0] == "launch"} == {"0"} and ran.log[-1] == ["live", "0"]


def test_any_thread_may_generate(engine: Path, library: Path, tmp_path: Path) -> None:
    ran = run(library, THREADS, engine, package_parent(), cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    assert ran.stdout.split(") ")[1].split() == ["2", "3", "3"]
    assert ran.log[-1] == ["live", "0"]


def package_parent() -> Path:
    """The folder from which `import icc` finds the package under test."""
    import icc

    return Path(icc.__path__[0]).parent


def test_objects_say_how_they_are_launched(engine: Path) -> None:
    plan = decode_program((engine / "program.json").read_bytes(), "program.json").plan
    assert plan is not None
    for found in plan.objects.values():
        facts = read_cubin((engine / found.file).read_bytes())
        assert (facts.entry, facts.threads) == (found.entry, found.warps * found.warp_size)
        assert [size for _, size in facts.parameters] == [8 if t[0] == "*" else 4 for t in (*found.types, "*", "*")]
        assert facts.static_shared == 0
        assert found.dependent and waits_first((engine / found.file).read_bytes())


def test_an_object_that_is_launched_otherwise_fails_the_build(engine: Path) -> None:
    plan = decode_program((engine / "program.json").read_bytes(), "program.json").plan
    assert plan is not None
    found = next(o for o in plan.objects.values() if o.entry == "select_rows")
    cubin = (engine / found.file).read_bytes()
    args = tuple(Arg(str(i), kind, "") for i, kind in enumerate(found.types))
    right = LaunchSpec("", found.entry, args, (ONE, ONE, ONE), found.warps)
    check_launch("k", cubin, right, found.entry)
    for wrong in (
        LaunchSpec("", found.entry, args[::-1], right.grid, found.warps),
        LaunchSpec("", found.entry, args[1:], right.grid, found.warps),
        LaunchSpec("", found.entry, args, right.grid, 2 * found.warps),
    ):
        with pytest.raises(CodegenError, match="the runtime launches"):
            check_launch("k", cubin, wrong, found.entry)
    without = cubin.replace(bytes.fromhex("2e78000000000000"), bytes.fromhex("1879000000000000"))  # NOP for ACQBULK
    assert without != cubin
    with pytest.raises(CodegenError, match="does not wait"):
        check_launch("k", without, replace(right, dependent=True), found.entry)
