"""RELIABILITY S13: mutants of icc's own code, each with one realistic bug, and the test that kills it.

    python tests/museum/museum.py [NAME ...] [--area AREA] [--shard 1/4] [--minutes 20] [--state build/museum.json]
        [--out benchmarks/results/museum.md] [--mutants-only]

The mutants are in tests/museum/mutants/AREA.toml. Each is put into a copy of the checkout (hard links), where its
test must fail and, without it, pass. A result in the state file is valid until the mutant, the file that it changes or
the file of its test changes. Exit code: 0 if all are killed, 1 if one is not, 3 if some are left to run.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = Path(__file__).with_name("mutants")
LEFT = 3  # exit code
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", ".*_cache", ".hypothesis", ".whl")
LIMIT_S = 400.0  # for one test, on a busy machine
State = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Mutant:
    """A bug: `new` replaces `old`, which `file` has once. test: a test's id for pytest. env: environment variables for
    the test, for example to select some of its cases."""

    name: str
    area: str
    file: str
    old: str
    new: str
    test: str
    env: dict[str, str] = field(default_factory=dict)

    def source(self) -> str:
        """The text of the file with the mutation. ValueError if `old` is not there exactly once."""
        text = (ROOT / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has its old text {text.count(self.old)} times")
        return text.replace(self.old, self.new)

    def digest(self) -> str:
        """SHA-256 of everything that decides whether it is killed: the mutant, the file that it changes, the file of
        its test."""
        files = (self.file, self.test.partition("::")[0])
        parts = [json.dumps(asdict(self)), *((ROOT / name).read_text() for name in files)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def all_mutants() -> list[Mutant]:
    """The mutants of all areas, in the order of the files."""
    found = []
    for file in sorted(MUTANTS.glob("*.toml")):
        found += [Mutant(area=file.stem, **entry) for entry in tomllib.loads(file.read_text())["mutant"]]
    return found


# -- running a test ------------------------------------------------------------------------------------------------


class Watch:
    """A plugin of pytest: counts the tests that passed, and keeps the message of the first that failed."""

    def __init__(self) -> None:
        self.passed, self.failed, self.broken = 0, "", ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not (self.failed or self.broken):
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash is not None else str(report.longrepr)
            line = next((line for line in said.splitlines() if line.strip()), "failed")
            if report.when == "call":
                self.failed = line
            else:
                self.broken = line
        self.passed += report.when == "call" and report.passed


def run_test(folder: Path, test: str, env: dict[str, str]) -> dict[str, Any]:
    """Run a test in the checkout at `folder`, in a fork of this process, which has imported the large libraries.
    "result": "passed", "failed", "broken" (it did not run) or "too long"; "said": the message, if there is one;
    "seconds"."""
    began, said = time.monotonic(), folder.parent / "said.json"
    said.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        _test(folder, test, env, said)  # does not return
    ended = 0
    while not ended and time.monotonic() - began < LIMIT_S:
        ended, _ = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
    try:
        os.killpg(pid, signal.SIGKILL)  # the test, and servers that it did not stop
    except ProcessLookupError:
        pass
    if not ended:
        os.waitpid(pid, 0)
    found = json.loads(said.read_text()) if said.is_file() else {"result": "broken" if ended else "too long"}
    return found | {"seconds": round(time.monotonic() - began, 1)}


def _test(folder: Path, test: str, env: dict[str, str], said: Path) -> None:
    try:
        os.setsid()
        quiet = os.open(folder.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os.chdir(folder)
        os.environ.update(env, PYTHONPATH=str(folder.parent), PYTHONDONTWRITEBYTECODE="1")
        os.environ.pop("PYTEST_CURRENT_TEST", None)
        sys.path.insert(0, str(folder.parent))  # `icc` is this copy, here and in the processes that the test starts
        for name in [name for name in sys.modules if name.partition(".")[0] == "icc"]:
            del sys.modules[name]  # if a test calls this, the checkout's own icc is imported
        import pytest

        if torch := sys.modules.get("torch"):
            torch.set_num_threads(torch.get_num_threads())  # the fork's thread pool: made before two threads need it
        watch = Watch()
        code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", test], plugins=[watch])
        if watch.failed:
            found = {"result": "failed", "said": watch.failed}
        elif code == 0 and watch.passed:
            found = {"result": "passed"}
        else:
            found = {"result": "broken", "said": watch.broken or f"pytest ended with {code}"}
        said.write_text(json.dumps(found))
    finally:
        os._exit(0)


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the checkout by hard links, in a folder named `icc` so that it can be imported."""
    parent = ROOT / "build"
    parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="museum-", dir=parent) as name:
        folder = Path(name) / "icc"
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT, copy_function=_link, symlinks=True)
        (Path(name) / "once").mkdir()
        os.environ.setdefault("ICC_COMPILED_ONCE", str(Path(name) / "once"))
        yield folder


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@contextmanager
def mutated(folder: Path, mutant: Mutant) -> Iterator[None]:
    """The copy has the mutation until the end of the block."""
    target = folder / mutant.file
    text = mutant.source()
    target.unlink()  # a hard link: the checkout's own file stays as it is
    target.write_text(text)
    try:
        yield
    finally:
        target.unlink()
        _link(str(ROOT / mutant.file), str(target))


def warm(mutants: Iterable[Mutant]) -> None:
    """Import the libraries that most of the tests import, once for all forks."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = ["pytest", "numpy", "msgspec", "tokenizers", "hypothesis", "hypothesis.stateful"]
    if any(not mutant.test.startswith("tests/runtime/") for mutant in mutants):
        names += ["torch", "triton", "triton.language", "transformers", "safetensors.torch"]
    for name in names:
        importlib.import_module(name)
    assert "icc" not in sys.modules
    sys.dont_write_bytecode = True  # would write through hard links into the checkout


# -- all of them ---------------------------------------------------------------------------------------------------


def judge(folder: Path, mutant: Mutant, whole: dict[str, str] | None) -> dict[str, Any]:
    """ "killed", or why not: "survived", "broken" where the test could not be run, or "fails without it". whole: what
    came of tests without any mutant; None not to ask."""
    test = f"{mutant.test} {mutant.env}"
    if whole is not None and test not in whole:
        whole[test] = run_test(folder, mutant.test, mutant.env)["result"]
    if whole is not None and whole[test] != "passed":
        return {"result": "fails without it", "said": whole[test]}
    with mutated(folder, mutant):
        found = run_test(folder, mutant.test, mutant.env)
    names = {"failed": "killed", "passed": "survived"}
    return found | {"result": names.get(found["result"], found["result"])}


def known(mutant: Mutant, state: State) -> str:
    """The known result of a mutant; "left" if there is none, or something has changed since."""
    found = state.get(mutant.name, {})
    return found["result"] if found.get("of") == mutant.digest() else "left"


def table(mutants: list[Mutant], state: State) -> str:
    """The results as a Markdown page."""
    results = {mutant.name: known(mutant, state) for mutant in mutants}
    killed = list(results.values()).count("killed")
    lines = [
        "# Museum: bugs that were put in, and the tests that found them", "",
        "Made by `make museum` (tests/museum). Each mutant changes one thing in one file, as a bug would; its test",
        "passes without it.", "", f"{killed} of {len(mutants)} are killed.", "",
    ]  # fmt: skip
    for area in dict.fromkeys(mutant.area for mutant in mutants):
        lines += [f"## {area}", "", "| mutant | file | test | result |", "|---|---|---|---|"]
        for mutant in (m for m in mutants if m.area == area):
            test = mutant.test.removeprefix("tests/").replace("|", r"\|")
            lines.append(f"| {mutant.name} | `{mutant.file}` | `{test}` | {results[mutant.name]} |")
        lines.append("")
    return "\n".join(lines)


def chosen(options: argparse.Namespace) -> list[Mutant]:
    mutants = all_mutants()
    if options.names:
        unknown = set(options.names) - {mutant.name for mutant in mutants}
        if unknown:
            sys.exit(f"no such mutant: {', '.join(sorted(unknown))}")
        mutants = [mutant for mutant in mutants if mutant.name in options.names]
    if options.area:
        mutants = [mutant for mutant in mutants if mutant.area == options.area]
    number, _, count = options.shard.partition("/")
    return mutants[int(number) - 1 :: int(count)]


def main() -> int:
    """Run the mutants whose results are not known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of mutants (default: all)")
    parser.add_argument("--area")
    parser.add_argument("--shard", default="1/1", help="every so-manieth mutant, from which one on")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "museum.json")
    parser.add_argument("--out", type=Path, help="write the table of all mutants there")
    parser.add_argument("--mutants-only", action="store_true", help="do not run the tests without mutants first")
    options = parser.parse_args()
    mutants, end = chosen(options), time.monotonic() + 60 * options.minutes
    state: State = json.loads(options.state.read_text()) if options.state.is_file() else {}
    left = [mutant for mutant in mutants if known(mutant, state) != "killed"]
    if left:
        warm(left)
        with copied() as folder:
            whole: dict[str, str] | None = None if options.mutants_only else {}
            for mutant in left:
                if time.monotonic() >= end:
                    break
                state[mutant.name] = found = {"of": mutant.digest(), **judge(folder, mutant, whole)}
                print(
                    f"{found['result']:>9} {mutant.name} {found.get('seconds', 0)} s: {found.get('said', '')[:150]}",
                    flush=True,
                )
                partial = options.state.with_suffix(f".{os.getpid()}")
                partial.write_text(json.dumps(state, indent=1) + "\n")
                partial.replace(options.state)
    if options.out:
        options.out.write_text(table(all_mutants(), state))
    results = [known(mutant, state) for mutant in mutants]
    print(", ".join(f"{results.count(kind)} {kind}" for kind in dict.fromkeys(results)))
    bad = set(results) - {"killed", "left"}
    return 1 if bad else LEFT if "left" in results else 0


if __name__ == "__main__":
    sys.exit(main())
