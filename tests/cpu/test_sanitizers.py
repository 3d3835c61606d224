"""R16: every generated kernel under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.

The libraries run in a process of their own that loads the sanitizer first (run_sanitized.py); any report ends it. Two
planted defects show that defects are reported.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cpu_harness import Builder
from icc.compiler.backends.cpu import build
from icc.compiler.backends.cpu.emit import emit_source
from icc.compiler.backends.cpu.isa import Isa, host_isas
from icc.compiler.backends.cpu.kernels.table import CPU_KERNELS
from icc.compiler.ops.pointwise import OPCODES
from icc.compiler.program.program import Program
from icc.compiler.program.steps.base import STEPS
from icc.compiler.program.steps.collective import Collective
from icc.compiler.program.steps.pointwise import Pointwise
from run_sanitized import programs, small_program
from sizes import SOAK, soak

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ISAS = {isa.name: isa for isa in host_isas()}
BEST = next(iter(ISAS))


def runtime_library(name: str) -> str:
    """The compiler's shared library of a sanitizer; skips the test if it is missing."""
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    if not os.path.isabs(path := found.stdout.strip()):
        pytest.skip(f"g++ has no {name}")
    return path


def build_all(folder: Path, builders: dict[str, Builder], isas: list[Isa], sanitize: str) -> None:
    """Build FOLDER/<program>/<isa>.so for all, two compilers at a time."""

    def one(task: tuple[str, Builder, Isa]) -> None:
        name, builder, isa = task
        build.build_libraries(builder.program(), folder / name, [isa], sanitize=sanitize, optimize="-O1")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, [(name, builder, isa) for isa in isas for name, builder in builders.items()]))


def drive(command: list[str], preload: str, *args: object, **options: str) -> subprocess.CompletedProcess[str]:
    """Run run_sanitized.py in a process that loads `preload` first."""
    env = os.environ | {"LD_PRELOAD": preload, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), **options}
    cmd = [*command, sys.executable, str(HERE / "run_sanitized.py"), *map(str, args)]
    return subprocess.run(cmd, env=env, capture_output=True, text=True, check=False)


def checked(*caches: str) -> dict[str, Builder]:
    """The programs to build: all ops, and attention over these cache types; in `make soak` over all cache types."""
    names = ("ops", "states", "choosing", *(f"attention_{dtype}" for dtype in caches))
    return {name: builder for name, builder in programs().items() if SOAK or name in names}


def test_every_kernel_and_opcode_is_in_the_programs() -> None:
    steps = [step for builder in programs().values() for step in builder.steps]
    ours = {op for op in CPU_KERNELS.ops() if STEPS[op].__module__.startswith("icc.")}  # other tests add ops of theirs
    together = {op for op in ours if issubclass(STEPS[op], Collective)}  # tested in test_ranks.py
    assert {step.op for step in steps} == ours - together
    bodies = [step.body for step in steps if isinstance(step, Pointwise)]
    assert {instruction.opcode for body in bodies for instruction in body.instructions} == set(OPCODES)


@pytest.fixture(scope="module")
def libasan() -> str:
    return runtime_library("libasan.so")


@pytest.fixture(scope="module")
def libtsan() -> str:
    return runtime_library("libtsan.so")


@pytest.fixture(scope="module")
def libraries(libasan: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs, with address and undefined-behaviour checks."""
    folder = tmp_path_factory.mktemp("address")
    build_all(
        folder, checked("i8"), list(ISAS.values()) if SOAK else [ISAS[BEST]], "address,undefined,float-cast-overflow"
    )
    return folder


class TestAddresses:
    """AddressSanitizer and UndefinedBehaviorSanitizer; in `make soak`, on every ISA level that this machine runs."""

    def drive(self, libasan: str, what: str, *args: object) -> subprocess.CompletedProcess[str]:
        return drive([], libasan, what, *args, ASAN_OPTIONS="detect_leaks=0")

    @pytest.mark.parametrize("isa", [BEST, *soak(*(isa for isa in ISAS if isa != BEST))])
    def test_no_report(self, libasan: str, libraries: Path, isa: str) -> None:
        done = self.drive(libasan, "all", libraries, isa, 2)
        assert done.returncode == 0 and "clean" in done.stdout, done.stderr[-4000:]

    def test_a_write_beyond_a_buffer_is_reported(self, libasan: str, libraries: Path) -> None:
        done = self.drive(libasan, "withheld", libraries, BEST, 1)
        assert done.returncode != 0 and "AddressSanitizer: use-after-poison" in done.stderr
        assert "WRITE of size" in done.stderr and "_pointwise" in done.stderr


class TestThreads:
    """ThreadSanitizer on the best level: the code of the threads' team is the same on all."""

    def drive(self, libtsan: str, what: str, folder: Path) -> subprocess.CompletedProcess[str]:
        # It needs its own part of the address space, which a kernel that randomizes many bits may give away.
        fixed = ["setarch", "-R"]
        works = shutil.which(fixed[0]) and not subprocess.run([*fixed, "true"], capture_output=True).returncode
        done = drive(fixed if works else [], libtsan, what, folder, BEST, 4, TSAN_OPTIONS="halt_on_error=1")
        if "FATAL: ThreadSanitizer" in done.stderr:
            pytest.skip(done.stderr.splitlines()[0])
        return done

    def test_no_report(self, libtsan: str, tmp_path: Path) -> None:
        """In `make test`, programs whose threads read what others have written: products, and attention split over
        threads."""
        build_all(tmp_path, checked("f32") if SOAK else {"small": small_program()}, [ISAS[BEST]], "thread")
        done = self.drive(libtsan, "all" if SOAK else "small", tmp_path)
        assert done.returncode == 0 and "clean" in done.stdout, done.stderr[-4000:]

    @pytest.mark.soak
    def test_a_barrier_that_orders_nothing_is_reported(
        self, libtsan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The threads still wait for each other, but nothing orders the writes of one before the reads of another."""

        def unordered(program: Program, isa: Isa) -> str:
            return re.sub(r"std::memory_order_\w+", "std::memory_order_relaxed", emit_source(program, isa))

        monkeypatch.setattr(build, "emit_source", unordered)
        build_all(tmp_path, {"small": small_program()}, [ISAS[BEST]], "thread")
        done = self.drive(libtsan, "small", tmp_path)
        assert done.returncode != 0 and "WARNING: ThreadSanitizer: data race" in done.stderr, done.stderr[-4000:]
