"""Kernel threads stay on the cores of LoadOptions.cores, according to the operating system."""

from __future__ import annotations

import os
import re
import tarfile
from pathlib import Path

import pytest
from icc.runtime import system
from icc.runtime.cli.commands import COMMANDS, main
from icc.runtime.commands import held_back as held
from icc.runtime.errors import UsageError
from icc.runtime.executor.cpu import cores
from icc.runtime.executor.cpu.cores import KernelCores, read_cores, usable_cores
from icc.runtime.format.isa import cpu_flags
from icc.runtime.loading import load
from icc.runtime.requests.params import SamplingParams

needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core, on which all is anyway")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    with tarfile.open(Path(__file__).parent / "golden" / "engines.v2.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def threads() -> dict[str, str]:
    """The cores on which each thread of this process may run, as a list in text, by the thread's id."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        status = (task / "status").read_text()
        found[task.name] = re.search(r"Cpus_allowed_list:\s*(\S+)", status)[1]  # type: ignore[index]
    return found


@needs_two
@pytest.mark.skipif(not cpu_flags() >= {"avx2", "fma", "f16c"}, reason="the engine's kernels need AVX2")
def test_kernel_threads_stay_on_their_cores(engines: Path) -> None:
    before, last = threads(), str(max(os.sched_getaffinity(0)))
    with load(engines / "llama.engine", threads=3, cores=last) as llm:
        started = {thread: cores for thread, cores in threads().items() if thread not in before}
        assert list(started.values()) == [last] * 2
        assert threads()[str(os.getpid())] == before[str(os.getpid())], "this thread runs no kernels yet"
        llm.generate([[1, 5, 9]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert threads()[str(os.getpid())] == last
    assert threads()[str(os.getpid())] == before[str(os.getpid())]
    with load(engines / "gemma2.engine", threads=2, cores=last, spec="none") as llm:  # a second executor uses them, too
        speculator = llm.speculator("layer-skip")
        assert [cores for thread, cores in threads().items() if thread not in before] == [last] * 2
        speculator.drafter.close()
    with load(engines / "llama.engine", cores=last) as llm:  # by default as many threads as cores
        assert not threads().keys() - before.keys()


def test_texts_of_cores() -> None:
    assert read_cores("0-3,8") == {0, 1, 2, 3, 8} and read_cores(" 2 ") == {2} and read_cores("1,1-2") == {1, 2}
    for wrong in ("", "a", "1-", "-1", "3-1", "1,,2", "0-99999", "1.5", "٣"):
        with pytest.raises(UsageError, match="is no core"):
            read_cores(wrong)
    assert usable_cores({0}) == 1


def test_cores_that_are_not_there_are_refused(engines: Path) -> None:
    with pytest.raises(UsageError, match="this process may not use core 65000"):
        KernelCores(frozenset({0, 65000}))
    with pytest.raises(UsageError, match="may not use core 65000"):
        load(engines / "llama.engine", cores="65000")


@pytest.mark.parametrize(
    ("engine", "option", "words"),
    [
        ("llama", "--device=1", "device = 1: the engine runs on the CPU"),
        ("h100", "--cores=0-1", "cores = '0-1': the engine runs on a GPU"),
        ("llama", "--cores=x", "'x' is no core, or range of cores"),
    ],
)
def test_what_is_for_another_back_end_is_refused_in_a_line(
    engines: Path, capsys: pytest.CaptureFixture[str], engine: str, option: str, words: str
) -> None:
    assert main(["run", str(engines / f"{engine}.engine"), "--ids", "1,2", option]) == UsageError.exit_code
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error and error.startswith("error: ")


@pytest.mark.parametrize("name", ["run", "chat", "serve", "bench"])
def test_commands_that_load_engines_have_them(name: str) -> None:
    assert {"--cores", "--device"} <= {opt for param in COMMANDS[name].load().params for opt in param.opts}


class Host:
    """A machine, described by its system files; no other file exists."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, **files: str) -> None:
        self.files = {"/" + name.replace("__", "/"): text for name, text in files.items()}
        monkeypatch.setattr(cores, "read_text", lambda file: self.files.get(str(file)))
        monkeypatch.setattr(held, "read_text", lambda file: self.files.get(str(file)))
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(count)))
        monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))


def test_slower_cores_of_a_hybrid_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = {f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n & ~1},{n | 1}" for n in range(4)}
    host = Host(
        monkeypatch, 8, sys__devices__cpu_core__cpus="0-3"
    )  # four hyperthreads of two fast cores, and four slow cores
    host.files |= siblings
    assert cores.fast_cores(range(8)) == cores.preferred_cores() == {0, 1, 2, 3} and usable_cores() == 2
    assert cores.fast_cores([5, 6]) == {5, 6}, "where it may use no other"
    assert usable_cores(range(8)) == 6, "cores that somebody names are taken"
    host.files = {
        f"/sys/devices/system/cpu/cpu{n}/cpu_capacity": str(value)
        for n, value in enumerate([446] * 4 + [871, 871, 1024, 1024])
    }
    assert cores.preferred_cores() == {4, 5, 6, 7} and usable_cores() == 4
    assert [text for text, _ in held.held_back(1)] == ["4 of 8 cores are slower ones"]
    assert cores.preferred_cores(1) == cores.preferred_cores(4) == {4, 5, 6, 7}, "fast ones first"
    assert cores.preferred_cores(5) is None, "more threads than there are fast ones take all"
    host.files |= {"/sys/fs/cgroup/cpu.max": "200000 100000"}
    assert usable_cores() == 2 and cores.preferred_cores(4) == {4, 5, 6, 7}, "a quota makes no core slower"
    host.files = {}
    assert cores.preferred_cores() is None and usable_cores() == 8 and not [*held.held_back(1)]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"hw.perflevel0.physicalcpu": 4, "hw.physicalcpu": 8}, 4),  # M1
        ({"hw.physicalcpu": 6}, 6),  # the last of Intel's, twelve hyperthreads
        ({}, 12),
    ],
)
def test_a_mac_has_as_many_threads_as_performance_cores(
    monkeypatch: pytest.MonkeyPatch, numbers: dict[str, int], expected: int
) -> None:
    Host(monkeypatch, 12)
    monkeypatch.setattr(system, "mac_number", lambda name: numbers.get(name, 0))
    assert usable_cores() == 12, "this is no Mac"
    monkeypatch.setattr(system, "system", lambda: system.MACOS)
    assert usable_cores() == expected and cores.preferred_cores() is None


V1 = {"/proc/self/cgroup": "3:cpu,cpuacct:/docker/x\n0::/\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}
NESTED = {"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/b/cpu.max": "max 100000"}
V1_OF = "/sys/fs/cgroup/cpu,cpuacct/docker{}/cpu.cfs_{}_us"  # without links to the controllers
V1_NESTED = {"/proc/self/cgroup": "5:cpuset:/y\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/z\n0::/\n"} | {
    V1_OF.format(part, name): value
    for part, quota in (("", "400000"), ("/x", "300000"))
    for name, value in (("quota", quota), ("period", "200000"))
}


@pytest.mark.parametrize(
    ("files", "granted"),
    [
        ({}, None),
        ({"/sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"/sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
        (NESTED, None),
        (NESTED | {"/sys/fs/cgroup/a/cpu.max": "50000 100000"}, 0.5),
        (NESTED | {"/sys/fs/cgroup/a/cpu.max": "300000 100000"}, 3),
        (V1 | {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000"}, 1.5),
        (V1 | {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}, None),
        (V1_NESTED, 1.5),
        (V1_NESTED | {V1_OF.format("/x", "quota"): "-1"}, 2),
        ({"/proc/self/cgroup": "5:cpuset:/y\n", "/sys/fs/cgroup/y/cpu.max": "100000 100000"}, None),
        ({"/proc/self/cgroup": "0::/../c:d\n", "/sys/fs/cgroup/../c:d/cpu.max": "400000 100000"}, 4),
        ({"/sys/fs/cgroup/cpu.max": "100000 0"}, None),
        ({"/sys/fs/cgroup/cpu.max": ""}, None),
    ],
)
def test_quotas_of_control_groups(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], granted: float | None
) -> None:
    Host(monkeypatch, 8).files |= files
    assert cores.granted_cores() == granted
    assert usable_cores() == (8 if granted is None else max(int(granted), 1))
    assert [text for text, _ in held.held_back(1)] == (
        [] if granted is None else [f"a quota of {granted:g} cores' time on 8 cores"]
    )


def test_a_quota_and_the_cores_that_a_process_may_use_both_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of taskset and cpusets, counting one hyperthread of each core, and the cgroup's quota."""
    host = Host(monkeypatch, 8)
    host.files |= {
        f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}" for n in range(8)
    }
    for allowed, quota, expected in (
        (range(8), "max", 4),
        ({0, 4}, "max", 1),
        ({0, 1, 5, 6}, "max", 3),
        ({0, 1, 5, 6}, "250000", 2),
        ({0, 4}, "300000", 1),
        (range(8), "99000", 1),
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, allowed=allowed: set(allowed))
        host.files["/sys/fs/cgroup/cpu.max"] = f"{quota} 100000"
        assert usable_cores() == expected, (allowed, quota)


@needs_two
@pytest.mark.skipif(not cpu_flags() >= {"avx2", "fma", "f16c"}, reason="the engine's kernels need AVX2")
def test_threads_that_somebody_counts_stay_on_fast_cores_while_these_are_enough(
    engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, fast = threads(), max(os.sched_getaffinity(0))
    monkeypatch.setattr(cores, "fast_cores", lambda allowed: frozenset({fast}))
    for count, expected in ((1, []), (2, [before[str(os.getpid())]])):
        with load(engines / "llama.engine", threads=count, spec="none") as llm:
            assert [where for thread, where in threads().items() if thread not in before] == expected
            llm.generate([[1, 5, 9]], SamplingParams(max_tokens=2, ignore_eos=True))
            assert threads()[str(os.getpid())] == (str(fast) if count == 1 else before[str(os.getpid())])


def test_what_else_holds_an_engine_back(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, 4, sys__kernel__mm__transparent_hugepage__enabled="always madvise [never]")
    host.files |= {f"/sys/devices/system/cpu/cpu{n}/topology/physical_package_id": str(n // 2) for n in range(4)}
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 2.0, 1.0))
    found = [text for text, _ in held.held_back(1)]
    assert found == ["2 sockets, and 1 rank", "a load of 3.0 on 4 cores", "no huge pages"]
    assert "2 sockets" not in str([*held.held_back(2)])
