"""One harness for all parsers of files and messages that others write: whatever the bytes are, a parser accepts them,
or refuses them in one line, within limits of time and memory.

    python tests/fuzz/fuzz.py [TARGET ...] [--minutes 20] [--seed N] [--list]

The targets are in targets.py. Each has seeds in tests/fuzz/corpus/TARGET/; every input that was once a finding
becomes a seed. A separate process tries one input after another, so that an input that kills it is known, too. Findings
are made smaller and written to the corpus; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from changing import MOST, Change

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
SECONDS = 1.0  # processor time for one input (RELIABILITY S2)
MEMORY = 256 << 20  # bytes by which one input may make the process grow
STUCK_S = 60  # a process that begins no new input for so long hangs
LARGEST = 3 << 30  # bytes of address space that a process may get in addition to those at its start


@dataclass(frozen=True)
class Target:
    """A parser to fuzz. parse: takes an input, and refuses it by an IccError. changes: the changes of inputs to try.
    weight: scales the number of examples in `make test`, less for slow targets. seconds: the limit for one input.
    before: runs first, for imports that take long."""

    name: str
    parse: Callable[[bytes], object]
    changes: Sequence[Change]
    weight: float = 1.0
    seconds: float = SECONDS
    before: Callable[[], object] = object

    def seeds(self) -> list[bytes]:
        """The inputs of the corpus, sorted by file name. Runs `before`, so that imports are not measured."""
        self.before()
        return [file.read_bytes() for file in sorted((CORPUS / self.name).iterdir())]


class Finding(Exception):
    """An input did something that no input may do."""


def check(target: Target, data: bytes) -> bool:
    """Whether an input was accepted. Finding if it was neither accepted nor refused in one line, or took too much time
    or memory."""
    from icc.runtime.errors import IccError

    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accepted = False
    try:
        target.parse(data)
        accepted = True
    except IccError as error:
        if not error.message.strip() or "\n" in error.message:
            raise Finding(f"refused in other than one line: {error.message[:300]!r}") from error
        if len(error.message) > 2000:
            raise Finding(f"refused in {len(error.message)} characters") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Rust's panics are not Exceptions
        raise Finding(f"{type(error).__name__}: {str(error)[:300]}") from error
    seconds = time.process_time() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if seconds > target.seconds:
        raise Finding(f"took {seconds:.1f} s")
    if grown > MEMORY:
        raise Finding(f"took {grown >> 20} MiB")
    return accepted


def examples(target: Target, seed: int) -> Iterator[bytes]:
    """Endless inputs: seeds with one to three changes."""
    chance, seeds = random.Random(f"{target.name} {seed}"), target.seeds()
    while True:
        data = chance.choice(seeds)
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            data = chance.choice(target.changes)(data, chance, seeds)[:MOST]
        yield data


def smaller(target: Target, data: bytes, seconds: float = 20) -> bytes:
    """An input with parts removed that still causes a finding, not necessarily the same one; the input itself if it
    causes none when tried again."""
    try:
        check(target, data)
        return data
    except Finding:
        pass
    end, size = time.monotonic() + seconds, len(data) // 2
    while size and time.monotonic() < end:
        at = 0
        while at < len(data) and time.monotonic() < end:
            shorter = data[:at] + data[at + size :]
            try:
                check(target, shorter)
                at += size
            except Finding:
                data = shorter
        size //= 2
    return data


def keep(target: Target, data: bytes) -> Path:
    """Write an input to the corpus."""
    file = CORPUS / target.name / f"found-{hashlib.sha256(data).hexdigest()[:10]}"
    file.write_bytes(data)
    return file


# -- for minutes -----------------------------------------------------------------------------------------------------


def _work(target: Target, seed: int, end: float, under: Path) -> None:
    """Try inputs until the time is over, then exit the process: 1 after a finding, else 0. The file `under` holds the
    input being tried."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + LARGEST, held + LARGEST))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tried = taken = 0
    for data in examples(target, seed):
        if time.monotonic() >= end:
            break
        under.write_bytes(data)
        try:
            taken += check(target, data)
        except Finding as finding:
            file = keep(target, smaller(target, data))
            print(f"{target.name}: {finding}\n  {file}", flush=True)
            os._exit(1)
        tried += 1
    print(f"{target.name}: {tried} inputs, {taken} of them accepted, nothing found", flush=True)
    os._exit(0)


def fuzz(target: Target, seed: int, seconds: float, under: Path) -> bool:
    """Whether nothing was found within `seconds`. An input that kills the process, or makes it hang, is a finding."""
    pid = os.fork()
    end = time.monotonic() + seconds
    if pid == 0:
        _work(target, seed, end, under)
    began = time.time()
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        time.sleep(0.1)
        last = under.stat().st_mtime if under.exists() else began
        if time.time() - max(last, began) > STUCK_S:
            os.kill(pid, signal.SIGKILL)
    if os.WIFSIGNALED(ended[1]):
        file = keep(target, under.read_bytes())
        print(f"{target.name}: the process was ended by signal {os.WTERMSIG(ended[1])}\n  {file}", flush=True)
        return False
    return os.waitstatus_to_exitcode(ended[1]) == 0


def main() -> int:
    """Fuzz some targets, each for its share of the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="default: all, one after the other")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--list", action="store_true", help="the names of all targets")
    options = parser.parse_args()
    from targets import TARGETS

    if options.list:
        print("\n".join(TARGETS))
        return 0
    if unknown := set(options.targets) - TARGETS.keys():
        parser.error(f"no such target: {', '.join(sorted(unknown))}; --list shows all")
    names = options.targets or list(TARGETS)
    under = HERE.parents[1] / "build" / f"fuzz-{os.getpid()}"
    under.parent.mkdir(exist_ok=True)
    print(f"seed {options.seed}", flush=True)
    try:
        seconds = 60 * options.minutes / len(names)
        return 0 if all([fuzz(TARGETS[name], options.seed, seconds, under) for name in names]) else 1
    finally:
        under.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
